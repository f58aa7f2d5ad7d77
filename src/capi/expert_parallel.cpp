// SPDX-License-Identifier: Apache-2.0
// The C ABI of experts over several GPUs.
#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "capi/convert.hpp"

struct tessera_peer_window {
  tessera::PeerWindow window;
};
struct tessera_expert_parallel {
  tessera::ExpertParallel session;
};

namespace {

using tessera::Status;
using tessera::StatusCode;
using namespace tessera::capi;

Status present(void const* pointer, char const* name) noexcept {
  return pointer == nullptr ? Status::invalid("%s: null pointer", name) : Status();
}

Status desc_of(tessera_expert_parallel_desc const* desc,
               tessera::ExpertParallelDesc& out) noexcept {
  tessera_expert_parallel_desc from;
  TESSERA_TRY(read_struct("tessera_expert_parallel_desc", desc, from));
  out.rank = from.rank;
  out.ranks = from.ranks;
  out.max_tokens = from.max_tokens;
  out.hidden = from.hidden;
  out.intermediate = from.intermediate;
  out.experts = from.experts;
  out.top_k = from.top_k;
  out.activation = activation_of(from.activation, from.alpha, from.limit, from.up_offset);
  out.partial_combine = from.partial_combine != 0;
  out.training = from.training != 0;
  if (from.time_limit != 0) out.time_limit = from.time_limit;
  out.sms = from.sms;
  return {};
}

template <class Value, class Call>
Status store(Value* out, Call call) noexcept {
  TESSERA_TRY(present(out, "output"));
  auto value = call();
  if (!value.ok()) return value.status();
  *out = value.value();
  return {};
}

Status make_id(char const* nccl_path, tessera_peer_group_id* id) noexcept {
  TESSERA_TRY(present(id, "id"));
  auto const made = tessera::PeerWindow::make_id(nccl_path);
  if (!made.ok()) return made.status();
  std::memcpy(id->bytes, made.value().bytes, sizeof id->bytes);
  return {};
}

Status open_window(tessera_context const* context, std::int32_t rank, std::int32_t ranks,
                   tessera_peer_group_id const* id, std::size_t bytes, char const* nccl_path,
                   tessera_peer_window** out) noexcept {
  TESSERA_TRY(check_context(context));
  TESSERA_TRY(present(id, "id"));
  TESSERA_TRY(present(out, "window"));
  *out = nullptr;
  tessera::PeerGroupId group;
  std::memcpy(group.bytes, id->bytes, sizeof group.bytes);
  auto window = tessera::PeerWindow::open(context->context, rank, ranks, group, bytes, nccl_path);
  if (!window.ok()) return window.status();
  *out = new (std::nothrow) tessera_peer_window{std::move(window).value()};
  return *out != nullptr ? Status()
                         : Status::error(StatusCode::out_of_memory, "no memory for a window");
}

Status open_all(std::int32_t const* device_indices, std::int32_t ranks, std::size_t bytes,
                tessera_peer_window** out) noexcept try {
  TESSERA_TRY(present(device_indices, "device_indices"));
  TESSERA_TRY(present(out, "windows"));
  if (ranks < 1 || ranks > tessera::kMaxRanks) {  // before anything is read or written by it
    return Status::invalid("ranks=%d: 1 to %d GPUs of one host", ranks, tessera::kMaxRanks);
  }
  auto const count = static_cast<std::size_t>(ranks);
  std::fill_n(out, count, nullptr);
  std::vector<tessera::Device> devices;
  for (std::size_t rank = 0; rank < count; ++rank) {
    devices.push_back({tessera::DeviceKind::cuda, device_indices[rank]});
  }
  auto windows = tessera::PeerWindow::open_all(devices, bytes);
  if (!windows.ok()) return windows.status();
  std::vector<std::unique_ptr<tessera_peer_window>> handles;
  for (tessera::PeerWindow& window : windows.value()) {
    handles.push_back(std::make_unique<tessera_peer_window>(std::move(window)));
  }
  for (std::size_t rank = 0; rank < count; ++rank) out[rank] = handles[rank].release();
  return {};
} catch (std::bad_alloc const&) {
  return Status::error(StatusCode::out_of_memory, "no memory for windows");
}

Status addresses(tessera_peer_window const* window, void** out) noexcept {
  TESSERA_TRY(present(window, "window"));
  TESSERA_TRY(present(out, "addresses"));
  for (void* address : window->window.addresses()) *out++ = address;
  return {};
}

Status close_window(tessera_peer_window* window) noexcept {
  if (window == nullptr) return {};
  Status const status = window->window.close();
  delete window;
  return status;
}

Status create(tessera_context const* context, tessera_expert_parallel_desc const* c_desc,
              void* const* windows, tessera_buffer workspace,
              tessera_expert_parallel** out) noexcept {
  TESSERA_TRY(check_context(context));
  TESSERA_TRY(present(windows, "windows"));
  TESSERA_TRY(present(out, "expert_parallel"));
  *out = nullptr;
  tessera::ExpertParallelDesc desc;
  TESSERA_TRY(desc_of(c_desc, desc));
  std::size_t const ranks = desc.ranks > 0 ? static_cast<std::size_t>(desc.ranks) : 0;
  auto session = tessera::ExpertParallel::create(context->context, desc, {windows, ranks},
                                                 buffer_of(workspace));
  if (!session.ok()) return session.status();
  *out = new (std::nothrow) tessera_expert_parallel{std::move(session).value()};
  return *out != nullptr ? Status()
                         : Status::error(StatusCode::out_of_memory, "no memory for a session");
}

// In the window.
Status place_of(tessera_expert_parallel const* session,
                tessera::Tensor (tessera::ExpertParallel::*input)(std::int64_t) const noexcept,
                void** out) noexcept {
  TESSERA_TRY(present(session, "expert_parallel"));
  TESSERA_TRY(present(out, "place"));
  *out = (session->session.*input)(0).data;
  return {};
}

Status forward(tessera_expert_parallel* session, tessera_expert_parallel_args const* c_args,
               void* stream) noexcept {
  TESSERA_TRY(present(session, "expert_parallel"));
  tessera_expert_parallel_args from;
  TESSERA_TRY(read_struct("tessera_expert_parallel_args", c_args, from));
  return session->session.forward({.x = tensor_of(from.x),
                                   .topk_ids = tensor_of(from.topk_ids),
                                   .topk_weights = tensor_of(from.topk_weights),
                                   .w_up = tensor_of(from.w_up),
                                   .w_down = tensor_of(from.w_down),
                                   .o = tensor_of(from.o),
                                   .saved = {.expert_offsets = tensor_of(from.expert_offsets),
                                             .row_origins = tensor_of(from.row_origins),
                                             .row_scores = tensor_of(from.row_scores)},
                                   .h = tensor_of(from.h),
                                   .may_overflow = from.may_overflow != 0,
                                   .b_up = tensor_of(from.b_up),
                                   .b_down = tensor_of(from.b_down)},
                                  {stream});
}

Status route(tessera_expert_parallel* session, tessera_expert_route_args const* c_args,
             void* stream) noexcept {
  TESSERA_TRY(present(session, "expert_parallel"));
  tessera_expert_route_args from;
  TESSERA_TRY(read_struct("tessera_expert_route_args", c_args, from));
  return session->session.route({.topk_ids = tensor_of(from.topk_ids),
                                 .topk_weights = tensor_of(from.topk_weights),
                                 .row_limit = from.row_limit},
                                {stream});
}

Status routed_rows(tessera_expert_parallel* session, std::int64_t passes_ago, std::int64_t* rows,
                   std::int32_t* all_fit) noexcept {
  TESSERA_TRY(present(session, "expert_parallel"));
  TESSERA_TRY(present(rows, "rows"));
  auto const routed = session->session.routed_rows(passes_ago);
  if (!routed.ok()) return routed.status();
  *rows = routed.value().rows;
  if (all_fit != nullptr) *all_fit = routed.value().all_fit ? 1 : 0;
  return {};
}

Status dispatch_args_of(tessera_expert_dispatch_args const* c_args,
                        tessera::ExpertDispatchArgs& args) noexcept {
  tessera_expert_dispatch_args from;
  TESSERA_TRY(read_struct("tessera_expert_dispatch_args", c_args, from));
  args = {.x = tensor_of(from.x),
          .second_x = tensor_of(from.second_x),
          .topk_ids = tensor_of(from.topk_ids),
          .tables = {.expert_offsets = tensor_of(from.expert_offsets),
                     .row_origins = tensor_of(from.row_origins),
                     .row_scores = tensor_of(from.row_scores)},
          .rows = tensor_of(from.rows),
          .second_rows = tensor_of(from.second_rows),
          .gathered = from.gathered != 0,
          .routing = buffer_of(from.routing),
          .may_overflow = from.may_overflow != 0,
          .sms = from.sms,
          .begun = from.begun};
  return {};
}

Status dispatch(tessera_expert_parallel* session, tessera_expert_dispatch_args const* c_args,
                void* stream) noexcept {
  TESSERA_TRY(present(session, "expert_parallel"));
  tessera::ExpertDispatchArgs args;
  TESSERA_TRY(dispatch_args_of(c_args, args));
  return session->session.dispatch(args, {stream});
}

Status combine_args_of(tessera_expert_combine_args const* c_args,
                       tessera::ExpertCombineArgs& args) noexcept {
  tessera_expert_combine_args from;
  TESSERA_TRY(read_struct("tessera_expert_combine_args", c_args, from));
  args = {.rows = tensor_of(from.rows),
          .tables = {.expert_offsets = tensor_of(from.expert_offsets),
                     .row_origins = tensor_of(from.row_origins)},
          .topk_weights = tensor_of(from.topk_weights),
          .row_dscores = tensor_of(from.row_dscores),
          .dscores = tensor_of(from.dscores),
          .o = tensor_of(from.o),
          .sms = from.sms,
          .begun = from.begun};
  return {};
}

Status combine(tessera_expert_parallel* session, tessera_expert_combine_args const* c_args,
               void* stream) noexcept {
  TESSERA_TRY(present(session, "expert_parallel"));
  tessera::ExpertCombineArgs args;
  TESSERA_TRY(combine_args_of(c_args, args));
  return session->session.combine(args, {stream});
}

Status backward(tessera_expert_parallel* session, tessera_expert_backward_args const* c_args,
                void* stream) noexcept {
  TESSERA_TRY(present(session, "expert_parallel"));
  tessera_expert_backward_args from;
  TESSERA_TRY(read_struct("tessera_expert_backward_args", c_args, from));
  TESSERA_TRY(check_context(from.context));
  tessera::ExpertDispatchArgs dispatch_args, second_args;
  tessera::MoeDesc input_desc, weights_desc;
  tessera::MoeBackwardArgs input, weights;
  tessera::ExpertCombineArgs combine_args;
  bool const dispatches = from.dispatch != nullptr;
  bool const has_second = from.second_dispatch != nullptr;
  bool const has_weights = from.weights != nullptr || from.weights_desc != nullptr;
  if (dispatches) TESSERA_TRY(dispatch_args_of(from.dispatch, dispatch_args));
  if (has_second) TESSERA_TRY(dispatch_args_of(from.second_dispatch, second_args));
  TESSERA_TRY(moe_desc_of(from.input_desc, input_desc));
  TESSERA_TRY(backward_args_of(from.input, input));
  if (has_weights) {
    TESSERA_TRY(moe_desc_of(from.weights_desc, weights_desc));
    TESSERA_TRY(backward_args_of(from.weights, weights));
  }
  TESSERA_TRY(combine_args_of(from.combine, combine_args));
  return session->session.backward({.dispatch = dispatches ? &dispatch_args : nullptr,
                                    .second_dispatch = has_second ? &second_args : nullptr,
                                    .context = &from.context->context,
                                    .input_desc = &input_desc,
                                    .input = &input,
                                    .weights_desc = has_weights ? &weights_desc : nullptr,
                                    .weights = has_weights ? &weights : nullptr,
                                    .combine = &combine_args,
                                    .side = {from.side_stream}},
                                   {stream});
}

}  // namespace

TESSERA_C_API int tessera_peer_group_id_make(char const* nccl_path, tessera_peer_group_id* id) {
  return finish(make_id(nccl_path, id));
}
TESSERA_C_API int tessera_peer_window_open(tessera_context const* context, int32_t rank,
                                           int32_t ranks, tessera_peer_group_id const* id,
                                           size_t bytes, char const* nccl_path,
                                           tessera_peer_window** window) {
  return finish(open_window(context, rank, ranks, id, bytes, nccl_path, window));
}
TESSERA_C_API int tessera_peer_window_open_all(int32_t const* device_indices, int32_t ranks,
                                               size_t bytes, tessera_peer_window** windows) {
  return finish(open_all(device_indices, ranks, bytes, windows));
}
TESSERA_C_API int tessera_peer_window_addresses(tessera_peer_window const* window, void** out) {
  return finish(addresses(window, out));
}
TESSERA_C_API int tessera_peer_window_close(tessera_peer_window* window) {
  return finish(close_window(window));
}
TESSERA_C_API void tessera_peer_window_abort(tessera_peer_window* window) { delete window; }

TESSERA_C_API int tessera_expert_parallel_window(tessera_expert_parallel_desc const* c_desc,
                                                 size_t* bytes) {
  tessera::ExpertParallelDesc desc;
  Status const status = desc_of(c_desc, desc);
  if (!status.ok()) return finish(status);
  return finish(store(bytes, [&] { return tessera::ExpertParallel::window_bytes(desc); }));
}
TESSERA_C_API int tessera_expert_parallel_workspace(tessera_context const* context,
                                                    tessera_expert_parallel_desc const* c_desc,
                                                    size_t* bytes) {
  tessera::ExpertParallelDesc desc;
  Status status = check_context(context);
  if (status.ok()) status = desc_of(c_desc, desc);
  if (!status.ok()) return finish(status);
  return finish(store(
      bytes, [&] { return tessera::ExpertParallel::workspace_bytes(context->context, desc); }));
}
TESSERA_C_API int tessera_expert_parallel_create(tessera_context const* context,
                                                 tessera_expert_parallel_desc const* desc,
                                                 void* const* windows, tessera_buffer workspace,
                                                 tessera_expert_parallel** session) {
  return finish(create(context, desc, windows, workspace, session));
}
TESSERA_C_API void tessera_expert_parallel_destroy(tessera_expert_parallel* session) {
  delete session;
}
TESSERA_C_API int tessera_expert_parallel_input(tessera_expert_parallel const* session, void** x) {
  return finish(place_of(session, &tessera::ExpertParallel::input, x));
}
TESSERA_C_API int tessera_expert_parallel_second_input(tessera_expert_parallel const* session,
                                                       void** second_x) {
  return finish(place_of(session, &tessera::ExpertParallel::second_input, second_x));
}
TESSERA_C_API int tessera_expert_parallel_forward(tessera_expert_parallel* session,
                                                  tessera_expert_parallel_args const* args,
                                                  void* stream) {
  return finish(forward(session, args, stream));
}
TESSERA_C_API int tessera_expert_parallel_route(tessera_expert_parallel* session,
                                                tessera_expert_route_args const* args,
                                                void* stream) {
  return finish(route(session, args, stream));
}
TESSERA_C_API int tessera_expert_parallel_routed_rows(tessera_expert_parallel* session,
                                                      int64_t passes_ago, int64_t* rows,
                                                      int32_t* all_fit) {
  return finish(routed_rows(session, passes_ago, rows, all_fit));
}
TESSERA_C_API int tessera_expert_parallel_dispatch(tessera_expert_parallel* session,
                                                   tessera_expert_dispatch_args const* args,
                                                   void* stream) {
  return finish(dispatch(session, args, stream));
}
TESSERA_C_API int tessera_expert_parallel_combine(tessera_expert_parallel* session,
                                                  tessera_expert_combine_args const* args,
                                                  void* stream) {
  return finish(combine(session, args, stream));
}
TESSERA_C_API int tessera_expert_parallel_backward(tessera_expert_parallel* session,
                                                   tessera_expert_backward_args const* args,
                                                   void* stream) {
  return finish(backward(session, args, stream));
}
TESSERA_C_API int tessera_expert_parallel_check(tessera_expert_parallel const* session) {
  Status const status = present(session, "expert_parallel");
  return finish(status.ok() ? session->session.check() : status);
}
