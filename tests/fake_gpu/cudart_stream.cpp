// The stand-in libcudart: a stream is a thread with a queue. Work that nobody waits for yet starts
// late on purpose, so that a missing wait shows at every run and not at one in a thousand.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "tests/fake_gpu/cudart.h"
#include "tests/fake_gpu/settings.h"

namespace gatefold_fake {

using Clock = std::chrono::steady_clock;

struct Work {
  std::function<void()> run;
  Clock::time_point start;  // at the latest
};

class Stream {
 public:
  Stream(int its_device, bool with_default) : device(its_device), blocking(with_default) {}

  const int device;
  const bool blocking;  // waits for the default stream, and that for it
  // Under the lock:
  std::deque<Work> queue;
  std::uint64_t submitted = 0;
  std::uint64_t done = 0;
  std::uint64_t wanted = 0;  // somebody waits for this many
  bool closing = false;
};

namespace {

// Neither dies: streams' threads outlive main().
std::mutex& mutex = *new std::mutex;
std::condition_variable& changed = *new std::condition_variable;
auto& streams = *new std::map<const void*, std::shared_ptr<Stream>>;
auto& default_streams = *new std::map<int, std::shared_ptr<Stream>>;
thread_local bool calling_host_function = false;

struct Event {
  int device = 0;
  bool timed = true;
  std::shared_ptr<Stream> stream;  // null: never recorded
  std::uint64_t ticket = 0;        // of its last record
  std::shared_ptr<std::optional<Clock::time_point>> time;
};
auto& events = *new std::map<const void*, std::shared_ptr<Event>>;

Clock::duration delay() {
  static const auto value = std::chrono::milliseconds(setting("DELAY_MS", 20));
  return value;
}

void serve(const std::shared_ptr<Stream>& stream) {
  adopt_device(stream->device);
  std::unique_lock lock(mutex);
  bool open = false;  // from work to work, as long as there is some
  while (true) {
    changed.wait(lock, [&] { return !stream->queue.empty() || stream->closing; });
    if (stream->queue.empty()) return;
    changed.wait_until(lock, stream->queue.front().start,
                       [&] { return stream->wanted > stream->done || stream->closing; });
    Work work = std::move(stream->queue.front());
    stream->queue.pop_front();
    lock.unlock();
    if (!std::exchange(open, true)) open_memory();
    if (broken(stream->device) == cudaSuccess) work.run();
    work.run = nullptr;
    lock.lock();
    if (stream->queue.empty() && std::exchange(open, false)) close_memory();
    ++stream->done;
    changed.notify_all();
  }
}

std::shared_ptr<Stream> make_stream(int device, bool blocking) {
  auto stream = std::make_shared<Stream>(device, blocking);
  std::thread(serve, stream).detach();
  return stream;
}

void wait_for(std::unique_lock<std::mutex>& lock, Stream& stream, std::uint64_t ticket) {
  stream.wanted = std::max(stream.wanted, ticket);
  changed.notify_all();
  changed.wait(lock, [&] { return stream.done >= ticket; });
}

void push(Stream& stream, std::function<void()> work) {
  stream.queue.push_back({std::move(work), Clock::now() + delay()});
  ++stream.submitted;
  changed.notify_all();
}

/// `stream` does nothing more until `other` has done `ticket`.
void push_wait(Stream& stream, const std::shared_ptr<Stream>& other, std::uint64_t ticket) {
  if (other->done >= ticket || other.get() == &stream) return;
  push(stream, [other, ticket] {
    std::unique_lock lock(mutex);
    wait_for(lock, *other, ticket);
  });
}

/// The default stream's rule: it and the blocking ones are as one.
void push_default_rule(const std::shared_ptr<Stream>& stream) {
  const auto found = default_streams.find(stream->device);
  if (found == default_streams.end()) return;
  if (found->second != stream) {
    if (stream->blocking) push_wait(*stream, found->second, found->second->submitted);
    return;
  }
  for (const auto& [handle, other] : streams) {
    if (other->device == stream->device && other->blocking) {
      push_wait(*stream, other, other->submitted);
    }
  }
}

cudaError_t query(Stream& stream, std::uint64_t ticket) {
  {
    const std::lock_guard lock(mutex);
    if (stream.done < ticket) {
      stream.wanted = std::max(stream.wanted, ticket);
      changed.notify_all();
      return failed(cudaErrorNotReady);
    }
  }
  return begin_call();
}

std::shared_ptr<Event> find_event(cudaEvent_t handle) {
  const std::lock_guard lock(mutex);
  const auto found = events.find(handle);
  return found == events.end() ? nullptr : found->second;
}

cudaError_t create_stream(cudaStream_t* handle, unsigned flags) {
  FAKE_BEGIN();
  if (handle == nullptr || (flags & ~unsigned{cudaStreamNonBlocking}) != 0) {
    return failed(cudaErrorInvalidValue);
  }
  if (fault("stream")) return failed(cudaErrorMemoryAllocation);
  auto stream = make_stream(current_device(), flags == cudaStreamDefault);
  const std::lock_guard lock(mutex);
  *handle = reinterpret_cast<cudaStream_t>(stream.get());
  streams[stream.get()] = stream;
  return cudaSuccess;
}

cudaError_t bad_stream(const char* call) {
  return failed(cudaErrorInvalidResourceHandle, std::string(call) + ": not a live stream");
}
cudaError_t bad_event(const char* call) {
  return failed(cudaErrorInvalidResourceHandle, std::string(call) + ": not a live event");
}

}  // namespace

bool in_host_function() { return calling_host_function; }
int device_of(const Stream& stream) { return stream.device; }

std::shared_ptr<Stream> find_stream(cudaStream_t handle) {
  const std::lock_guard lock(mutex);
  if (handle == nullptr || handle == cudaStreamLegacy) {
    auto& stream = default_streams[current_device()];
    if (stream == nullptr) stream = make_stream(current_device(), true);
    return stream;
  }
  const auto found = streams.find(handle);
  return found == streams.end() ? nullptr : found->second;
}

void enqueue(const std::shared_ptr<Stream>& stream, std::function<void()> work) {
  const std::lock_guard lock(mutex);
  push_default_rule(stream);
  push(*stream, std::move(work));
}

void finish(const std::shared_ptr<Stream>& stream) {
  std::unique_lock lock(mutex);
  wait_for(lock, *stream, stream->submitted);
}

void finish_device(int device) {
  std::vector<std::shared_ptr<Stream>> all;
  {
    const std::lock_guard lock(mutex);
    for (const auto& [handle, stream] : streams) {
      if (stream->device == device) all.push_back(stream);
    }
    if (const auto found = default_streams.find(device); found != default_streams.end()) {
      all.push_back(found->second);
    }
  }
  // One after the other: what no stream waits for may still come last.
  for (const auto& stream : all) finish(stream);
}

}  // namespace gatefold_fake

using namespace gatefold_fake;

cudaError_t cudaStreamCreate(cudaStream_t* stream) { return create_stream(stream, 0); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return create_stream(stream, flags);
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  return create_stream(stream, flags);
}

cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  FAKE_BEGIN();
  const std::lock_guard lock(mutex);
  const auto found = streams.find(handle);
  if (found == streams.end()) return bad_stream("cudaStreamDestroy");
  found->second->closing = true;  // its thread still does what is in the queue
  streams.erase(found);
  changed.notify_all();
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  FAKE_BEGIN();
  const auto stream = find_stream(handle);
  if (stream == nullptr) return bad_stream("cudaStreamSynchronize");
  finish(stream);
  check_guards(device_of(*stream));
  return begin_call();
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
  FAKE_BEGIN();
  const auto stream = find_stream(handle);
  if (stream == nullptr) return bad_stream("cudaStreamQuery");
  std::uint64_t all = 0;
  {
    const std::lock_guard lock(mutex);
    all = stream->submitted;
  }
  return query(*stream, all);
}

cudaError_t cudaStreamGetDevice(cudaStream_t handle, int* device) {
  FAKE_BEGIN();
  const auto stream = find_stream(handle);
  if (stream == nullptr) return bad_stream("cudaStreamGetDevice");
  *device = device_of(*stream);
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  FAKE_BEGIN();
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event_handle, unsigned) {
  FAKE_BEGIN();
  const auto stream = find_stream(handle);
  if (stream == nullptr) return bad_stream("cudaStreamWaitEvent");
  const auto event = find_event(event_handle);
  if (event == nullptr) return bad_event("cudaStreamWaitEvent");
  const std::lock_guard lock(mutex);
  if (event->stream != nullptr) push_wait(*stream, event->stream, event->ticket);
  return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* data) {
  FAKE_BEGIN();
  const auto stream = find_stream(handle);
  if (stream == nullptr) return bad_stream("cudaLaunchHostFunc");
  if (function == nullptr) return failed(cudaErrorInvalidValue);
  enqueue(stream, [function, data] {
    calling_host_function = true;
    function(data);
    calling_host_function = false;
  });
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* handle, unsigned flags) {
  FAKE_BEGIN();
  if (fault("event")) return failed(cudaErrorMemoryAllocation);
  auto event = std::make_shared<Event>();
  event->device = current_device();
  event->timed = (flags & cudaEventDisableTiming) == 0;
  const std::lock_guard lock(mutex);
  *handle = reinterpret_cast<cudaEvent_t>(event.get());
  events[event.get()] = event;
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* handle) { return cudaEventCreateWithFlags(handle, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  FAKE_BEGIN();
  const std::lock_guard lock(mutex);
  return events.erase(handle) == 1 ? cudaSuccess : bad_event("cudaEventDestroy");
}

cudaError_t cudaEventRecord(cudaEvent_t event_handle, cudaStream_t handle) {
  FAKE_BEGIN();
  const auto stream = find_stream(handle);
  if (stream == nullptr) return bad_stream("cudaEventRecord");
  const auto event = find_event(event_handle);
  if (event == nullptr) return bad_event("cudaEventRecord");
  if (event->device != device_of(*stream)) {
    return failed(cudaErrorInvalidResourceHandle,
                  "cudaEventRecord: event and stream are of two devices");
  }
  auto time = std::make_shared<std::optional<Clock::time_point>>();
  const std::lock_guard lock(mutex);
  push_default_rule(stream);
  push(*stream, [time] {
    const std::lock_guard inner(mutex);
    *time = Clock::now();
  });
  event->stream = stream;
  event->ticket = stream->submitted;
  event->time = time;
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
  FAKE_BEGIN();
  const auto event = find_event(handle);
  if (event == nullptr) return bad_event("cudaEventQuery");
  return event->stream == nullptr ? cudaSuccess : query(*event->stream, event->ticket);
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  FAKE_BEGIN();
  const auto event = find_event(handle);
  if (event == nullptr) return bad_event("cudaEventSynchronize");
  if (event->stream != nullptr) {
    std::unique_lock lock(mutex);
    wait_for(lock, *event->stream, event->ticket);
  }
  return begin_call();
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
  FAKE_BEGIN();
  const auto first = find_event(from);
  const auto second = find_event(to);
  if (first == nullptr || second == nullptr) return bad_event("cudaEventElapsedTime");
  if (!first->timed || !second->timed || first->stream == nullptr || second->stream == nullptr) {
    return failed(cudaErrorInvalidResourceHandle);
  }
  const std::lock_guard lock(mutex);
  if (!first->time->has_value() || !second->time->has_value()) return failed(cudaErrorNotReady);
  *milliseconds = std::chrono::duration<float, std::milli>(**second->time - **first->time).count();
  return cudaSuccess;
}
