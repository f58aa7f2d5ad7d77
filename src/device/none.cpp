// SPDX-License-Identifier: Apache-2.0
// A build without CUDA: no Context on a GPU can be made, so no program gets here.
#include "device/device.hpp"

namespace tessera::device {
namespace {

[[noreturn]] void fail() {
  throw Error("this build has no CUDA; configure with -DTESSERA_CUDA=ON");
}

}  // namespace

void Release::operator()(std::byte*) const noexcept {}
Memory allocate(std::int32_t, std::size_t, Kind) { fail(); }
void enable_peer_access(std::int32_t, std::int32_t) { fail(); }
void upload(void*, void const*, std::size_t) { fail(); }
void download(void*, void const*, std::size_t) { fail(); }
Stream::Stream(std::int32_t) { fail(); }
Stream::~Stream() = default;
void Stream::synchronize() const { fail(); }
void Stream::fill_uniform(void*, std::int64_t, std::uint64_t, float) const { fail(); }
void Stream::fill(void*, int, std::size_t) const { fail(); }
void Stream::copy(void*, void const*, std::size_t) const { fail(); }
Graph::Graph(Stream const&, std::function<void()> const&) { fail(); }
Graph::~Graph() = default;
void Graph::launch(Stream const&) const { fail(); }
std::vector<KernelGraph> kernel_graphs(Stream const&, std::function<void()> const&) { fail(); }
Event::Event() { fail(); }
Event::~Event() = default;
void Event::record(Stream const&) const { fail(); }
float Event::since(Event const&) const { fail(); }
Stopwatch::Stopwatch(std::int32_t) { fail(); }
void Stopwatch::start(Stream const&) const { fail(); }
void Stopwatch::stop(Stream const&) const { fail(); }
float Stopwatch::mhz() const { fail(); }
Gate::Gate() { fail(); }
Gate::~Gate() = default;
void Gate::hold(Stream const&, std::uint32_t) const { fail(); }
void Gate::open() noexcept {}
Facts facts(std::int32_t) { fail(); }
std::size_t free_bytes() { fail(); }

}  // namespace tessera::device
