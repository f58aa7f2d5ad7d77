// SPDX-License-Identifier: Apache-2.0
#include "expert_parallel/hosts/rail.hpp"

#include <chrono>
#include <cstdio>
#include <cstring>
#include <new>
#include <utility>

#include "expert_parallel/transport/engine.hpp"

namespace tessera::expert_parallel::hosts {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kLook{20};       // between two looks at what is waited for
constexpr std::chrono::microseconds kShortLook{50};  // while a host waits

double now() noexcept {
  return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
}

Status out_of_memory() noexcept {
  return Status::error(StatusCode::out_of_memory, "no memory for a rail; end other processes");
}

Status check(RailConfig const& config) noexcept {
  HostPlace const& p = config.place;
  if (p.hosts < 1 || p.hosts > kMaxHosts) {
    return Status::invalid("hosts=%d: 1 to %d", p.hosts, kMaxHosts);
  }
  if (p.host < 0 || p.host >= p.hosts) {
    return Status::invalid("host=%d: 0 to hosts-1 = %d", p.host, p.hosts - 1);
  }
  if (p.rank < 0 || p.rank >= kMaxRanks) {
    return Status::invalid("rank=%d: 0 to %d, within a host", p.rank, kMaxRanks - 1);
  }
  if (!(config.time_limit > 0) || !(config.time_limit <= 86400)) {
    return Status::invalid("time_limit=%g: seconds, above 0 and at most a day", config.time_limit);
  }
  return check_multicast_is_off(config.nccl_nvls_enable);
}

}  // namespace

Expected<std::unique_ptr<Rail>> Rail::open(RailConfig const& config, DeviceCalls const& device,
                                           StreamCalls const& calls) noexcept {
  TESSERA_TRY(check(config));
  auto nccl = NcclLibrary::load(config.nccl_path);
  if (!nccl.ok()) return nccl.status();
  DeviceScope const scope(device, config.device, ContextChoice::primary);
  TESSERA_TRY(scope.status());
  std::unique_ptr<Rail> rail(new (std::nothrow) Rail(config, device, calls, nccl.value()));
  if (rail == nullptr) return out_of_memory();
  rail->config_.nccl_path = rail->config_.nccl_nvls_enable = nullptr;  // the caller's strings
  if (config.place.hosts == 1) return rail;
  NcclConfig217 nccl_config;
  nccl_config.blocking = 0;  // a rank that does not come would block its counterparts for good
  NcclLibrary const& lib = rail->nccl_;
  std::int32_t const other = config.place.host == 0 ? 1 : 0;
  std::lock_guard const lock(rail->communicator_mutex_);
  NcclResult const begun = lib.comm_init_rank_config(&rail->communicator_, config.place.hosts,
                                                     config.id, config.place.host, &nccl_config);
  if (begun != kNcclInProgress) TESSERA_TRY(lib.check(begun, "ncclCommInitRankConfig"));
  TESSERA_TRY(rail->await_communicator("joining the rail", other));
  return rail;
}

Rail::~Rail() {
  end_watch();
  DeviceScope const scope(device_, config_.device, ContextChoice::primary);
  if (!scope.status().ok()) return;
  abort();
  for (Wait const& wait : waits_) {
    calls_.free_event(wait.ahead);
    calls_.free_event(wait.behind);
  }
  for (void* const event : events_) calls_.free_event(event);
  if (numbers_ != nullptr) calls_.free_host_memory(numbers_);
}

Status Rail::begin(char const* what) noexcept {
  TESSERA_TRY(fault());
  moment_ = {moment_.number + 1, what};
  return {};
}

Status Rail::fault() const noexcept {
  std::lock_guard const lock(mutex_);
  return fault_;
}

// The first failure stays: the others follow from it.
Status Rail::fail(char const* what, std::int32_t host, char const* why,
                  Moment const& moment) noexcept {
  std::lock_guard const lock(mutex_);
  if (fault_.ok()) {
    HostPlace const& p = config_.place;
    fault_ = Status::error(
        StatusCode::device_error,
        "rank %d of host %d at pass %llu (%s), %s: rank %d of host %d did not come (%s); destroy "
        "the rails and objects of all ranks and make them anew",
        p.rank, p.host, static_cast<unsigned long long>(moment.number), moment.what, what, p.rank,
        host, why);
  }
  return fault_;
}

// With communicator_mutex_. Ends what the GPU waits for.
void Rail::abort() noexcept {
  if (communicator_ != nullptr) nccl_.comm_abort(std::exchange(communicator_, nullptr));
}

// With communicator_mutex_. Until what was begun is under way; a failure is named, and aborts.
Status Rail::await_communicator(char const* what, std::int32_t host) noexcept {
  double const begin = now();
  while (true) {
    NcclResult state = kNcclSuccess;
    NcclResult const asked = nccl_.comm_get_async_error(communicator_, &state);
    if (asked != kNcclSuccess) state = asked;
    if (state == kNcclSuccess) return {};
    char why[96] = {};
    if (state != kNcclInProgress) {
      std::snprintf(why, sizeof why, "%s", nccl_.text(state));
    } else if (now() - begin > config_.time_limit) {
      std::snprintf(why, sizeof why, "not within %g s", config_.time_limit);
    } else {
      std::this_thread::sleep_for(kShortLook);
      continue;
    }
    Status const status = fail(what, host, why, moment_);
    abort();
    return status;
  }
}

Status Rail::enqueue(char const* what, std::span<Message const> messages, Stream stream) noexcept {
  std::lock_guard const lock(communicator_mutex_);
  TESSERA_TRY(fault());
  if (communicator_ == nullptr) return Status::invalid("the rail is closed; open another");
  TESSERA_TRY(nccl_.check(nccl_.group_start(), "ncclGroupStart"));
  NcclResult failed = kNcclSuccess;
  auto const note = [&](NcclResult result) {
    if (result != kNcclSuccess && result != kNcclInProgress && failed == kNcclSuccess) {
      failed = result;
    }
  };
  for (Message const& m : messages) {
    if (m.out_bytes > 0) {
      note(nccl_.send(m.out, m.out_bytes, kNcclBytes, m.to, communicator_, stream.native));
    }
    if (m.into_bytes > 0) {
      note(nccl_.receive(m.into, m.into_bytes, kNcclBytes, m.of, communicator_, stream.native));
    }
  }
  note(nccl_.group_end());
  std::int32_t const host = messages.front().of;
  if (failed != kNcclSuccess) {
    Status const status = fail(what, host, nccl_.text(failed), moment_);
    abort();
    return status;
  }
  TESSERA_TRY(await_communicator(what, host));
  for (Message const& m : messages) {
    sent_[static_cast<std::size_t>(m.to)] += static_cast<std::int64_t>(m.out_bytes);
  }
  return {};
}

// With mutex_.
Expected<void*> Rail::take_event() {
  if (events_.empty()) {
    events_.reserve(++made_);
    return calls_.make_event();
  }
  void* const event = events_.back();
  events_.pop_back();
  return event;
}

Status Rail::exchange(char const* what, std::span<Message const> messages, Stream stream) noexcept
    try {
  bool is_empty = true;
  for (Message const& m : messages) is_empty &= m.out_bytes == 0 && m.into_bytes == 0;
  if (is_empty) return fault();
  auto const captures = calls_.captures(stream);
  if (!captures.ok()) return captures.status();
  if (captures.value()) return enqueue(what, messages, stream);
  Wait wait = {what, messages.front().of, moment_, nullptr, nullptr};
  {
    std::lock_guard const lock(mutex_);
    for (void** const event : {&wait.ahead, &wait.behind}) {
      auto const taken = take_event();
      if (!taken.ok()) return taken.status();
      *event = taken.value();
    }
  }
  Status status = calls_.record(wait.ahead, stream);
  if (status.ok()) status = enqueue(what, messages, stream);
  if (status.ok()) status = calls_.record(wait.behind, stream);
  std::lock_guard const lock(mutex_);
  if (!status.ok()) {
    events_.insert(events_.end(), {wait.ahead, wait.behind});
    return status;
  }
  waits_.push_back(wait);
  if (!thread_.joinable()) thread_ = std::thread([this] { watch(); });
  changed_.notify_one();
  return {};
} catch (std::exception const&) {  // no memory, no thread
  return out_of_memory();
}

Status Rail::read(void* host, void const* device_memory, std::size_t bytes, Stream stream) noexcept
    try {
  if (bytes > number_bytes_) {
    if (numbers_ != nullptr) calls_.free_host_memory(std::exchange(numbers_, nullptr));
    auto const memory = calls_.host_memory(bytes);
    if (!memory.ok()) return memory.status();
    numbers_ = memory.value();
    number_bytes_ = bytes;
  }
  TESSERA_TRY(calls_.read(numbers_, device_memory, bytes, stream));
  void* event = nullptr;
  {
    std::lock_guard const lock(mutex_);
    auto const taken = take_event();
    if (!taken.ok()) return taken.status();
    event = taken.value();
  }
  Status status = calls_.record(event, stream);
  // The thread ends what the stream waits for ahead of it.
  while (status.ok()) {
    auto const passed = calls_.passed(event);
    status = passed.status();
    if (passed.ok() && passed.value()) break;
    std::this_thread::sleep_for(kShortLook);
  }
  std::lock_guard const lock(mutex_);
  events_.push_back(event);
  if (status.ok()) status = fault_;  // they are no numbers where a counterpart did not come
  if (status.ok()) std::memcpy(host, numbers_, bytes);
  return status;
} catch (std::exception const&) {
  return out_of_memory();
}

void Rail::watch() noexcept {
  DeviceScope const scope(device_, config_.device, ContextChoice::primary);
  if (!scope.status().ok()) return;
  calls_.stand_beside_captures();
  double waited_from = 0;
  while (look(waited_from)) {
  }
}

// Looks at the first wait, once there is one; false when there is nothing to watch any more. waited_from: when the
// stream was seen to have come there, 0 before that.
bool Rail::look(double& waited_from) noexcept {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return ended_ || !waits_.empty(); });
  if (ended_) return false;
  Wait const wait = waits_.front();
  auto const passed = calls_.passed(wait.behind);
  if (!passed.ok()) return false;  // the GPU has failed, which its next call says
  if (passed.value()) {
    events_.insert(events_.end(), {wait.ahead, wait.behind});  // for which there is memory
    waits_.pop_front();
    waited_from = 0;
    return true;
  }
  if (waited_from == 0) {
    auto const reached = calls_.passed(wait.ahead);
    if (!reached.ok()) return false;
    if (reached.value()) waited_from = now();
  }
  lock.unlock();
  char why[96] = {};
  if (waited_from != 0 && now() - waited_from > config_.time_limit) {
    std::snprintf(why, sizeof why, "no message within %g s", config_.time_limit);
  }
  if (!ask_communicator(wait, why)) return false;
  lock.lock();
  changed_.wait_for(lock, kLook, [&] { return ended_; });
  return true;
}

// Says whether the communicator is well. Where it is not, or `why` says what else ends the wait, the failure is noted
// and the communicator aborted.
bool Rail::ask_communicator(Wait const& wait, char const* why) noexcept {
  std::lock_guard const lock(communicator_mutex_);
  if (communicator_ == nullptr) return false;
  NcclResult state = kNcclSuccess;
  if (nccl_.comm_get_async_error(communicator_, &state) != kNcclSuccess) return false;
  bool const well = state == kNcclSuccess || state == kNcclInProgress;
  if (well && why[0] == '\0') return true;
  static_cast<void>(fail(wait.what, wait.host, well ? why : nccl_.text(state), wait.moment));
  abort();
  return false;
}

void Rail::end_watch() noexcept {
  {
    std::lock_guard const lock(mutex_);
    ended_ = true;
    changed_.notify_one();
  }
  if (thread_.joinable()) thread_.join();
}

Status Rail::close() noexcept {
  Status const waited = wait_for_kernels(device_, config_.device);
  end_watch();
  TESSERA_TRY(fault());
  TESSERA_TRY(waited);
  std::lock_guard const lock(communicator_mutex_);
  if (communicator_ == nullptr) return {};
  DeviceScope const scope(device_, config_.device, ContextChoice::primary);
  TESSERA_TRY(scope.status());
  NcclResult const result = nccl_.comm_destroy(std::exchange(communicator_, nullptr));
  // A communicator that does not block may go on ending by itself.
  return result == kNcclInProgress ? Status() : nccl_.check(result, "ncclCommDestroy");
}

}  // namespace tessera::expert_parallel::hosts
