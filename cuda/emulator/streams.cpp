// Streams, events, copies and graphs. Work in a stream is done when something waits for it, not before
// (INFINILM_EMULATOR_STREAMS=eager: at once): a missing synchronisation or event shows as old data. Work in the null
// stream first waits for the blocking streams, then is done at once. A graph is the list of what was captured; making
// one and letting go of it wait for all devices, since the real driver may, when it takes memory that peers can reach
// or gives it back.
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "fiber.h"
#include "runtime.h"
#include "state.h"

using infinilm::emulator::Work;

struct Capture {
    cudaStream_t origin;
    cudaStreamCaptureMode mode;
    std::thread::id thread;  // that began it
    bool invalid = false;
    std::vector<Work> work;
    std::map<cudaStream_t, bool> streams;  // of the capture; true: has work that no stream has waited for
};
struct CUstream_st {
    unsigned flags = cudaStreamDefault;
    int device = 0;
    std::deque<Work> queue;
    std::shared_ptr<Capture> capture;
    std::thread::id runner{};  // the host thread in the middle of its work
};
struct Marker {  // a place in a stream's order
    cudaStream_t stream;
    bool done = false;
    std::chrono::steady_clock::time_point time{};
};
struct CUevent_st {
    unsigned flags = cudaEventDefault;
    std::shared_ptr<Marker> marker;  // null: never recorded
    std::weak_ptr<Capture> capture;  // recorded during a capture
    cudaStream_t capture_stream = nullptr;
    size_t capture_position = 0;
};
struct CUgraph_st {
    std::vector<Work> work;
};
struct CUgraphExec_st {
    std::shared_ptr<const std::vector<Work>> work;
};

namespace infinilm::emulator {
namespace {

CUstream_st& null_stream() {
    static auto* stream = new CUstream_st;
    return *stream;
}
std::set<cudaStream_t>& streams() {
    static auto* all = new std::set<cudaStream_t>;
    return *all;
}
std::set<Capture*>& captures() {
    static auto* all = new std::set<Capture*>;
    return *all;
}

// The stream behind a handle, or null for one that is not (any more) a stream.
CUstream_st* find(cudaStream_t stream) {
    if (!stream) return &null_stream();
    return streams().count(stream) ? stream : nullptr;
}

bool eager_streams() {
    const char* text = getenv("INFINILM_EMULATOR_STREAMS");
    return text && !strcmp(text, "eager");
}

// A kernel of another host thread may be in the middle of its grid, having given way to this one.
bool runs_elsewhere(const CUstream_st& stream) {
    return stream.runner != std::thread::id() && stream.runner != std::this_thread::get_id();
}

void run_one(CUstream_st& stream) {
    if (runs_elsewhere(stream)) return runtime_lock().give_way();
    Work work = std::move(stream.queue.front());
    stream.queue.pop_front();
    const std::thread::id before = std::exchange(stream.runner, std::this_thread::get_id());
    work();
    stream.runner = before;
}

void drain_blocking() {
    for (cudaStream_t stream : std::set(streams()))
        if (find(stream) && !(stream->flags & cudaStreamNonBlocking)) drain(stream);
}

void wait_for(const std::shared_ptr<Marker>& marker) {
    while (!marker->done) {
        if (marker->stream->queue.empty() && !runs_elsewhere(*marker->stream))
            fail("streams", "an event waits for work that is not in its stream");
        run_one(*marker->stream);
    }
    acquire_grids();
}

void invalidate(CUstream_st& stream) {
    if (stream.capture) stream.capture->invalid = true;
}

// For calls that wait for a stream or event: not allowed on a capturing stream.
cudaError_t check_waitable(CUstream_st* stream) {
    if (!stream) return cudaErrorInvalidResourceHandle;
    if (!stream->capture) return cudaSuccess;
    invalidate(*stream);
    return cudaErrorStreamCaptureUnsupported;
}

cudaError_t check_direction(const void* dst, const void* src, cudaMemcpyKind kind) {
    const bool to_device = memory_kind(dst) == MemoryKind::device, from_device = memory_kind(src) == MemoryKind::device;
    switch (kind) {
        case cudaMemcpyDefault: return cudaSuccess;
        case cudaMemcpyHostToHost: return to_device || from_device ? cudaErrorInvalidValue : cudaSuccess;
        case cudaMemcpyHostToDevice: return !to_device || from_device ? cudaErrorInvalidValue : cudaSuccess;
        case cudaMemcpyDeviceToHost: return to_device || !from_device ? cudaErrorInvalidValue : cudaSuccess;
        case cudaMemcpyDeviceToDevice: return !to_device || !from_device ? cudaErrorInvalidValue : cudaSuccess;
    }
    return cudaErrorInvalidMemcpyDirection;
}

uint64_t uploaded_bytes = 0;

void copy_now(void* dst, const void* src, size_t bytes) {
    Quiet quiet;
    check_range(dst, bytes, "copy, destination");
    check_range(src, bytes, "copy, source");
    DeviceAccess access;
    memmove(dst, src, bytes);
}

cudaError_t copy_async(void* dst, const void* src, size_t bytes, cudaMemcpyKind kind, CUstream_st& stream) {
    if (cudaError_t error = check_direction(dst, src, kind)) return error;
    if (bytes == 0) return cudaSuccess;
    check_range(dst, bytes, "copy, destination");
    check_range(src, bytes, "copy, source");
    const bool from_pageable = memory_kind(src) == MemoryKind::pageable,
               to_pageable = memory_kind(dst) == MemoryKind::pageable;
    if (memory_kind(src) != MemoryKind::device && memory_kind(dst) == MemoryKind::device) uploaded_bytes += bytes;
    const bool keeps_lock = to_pageable && !stream.capture;
    const auto lock = keeps_lock ? std::make_unique<DriverLock>(stream.device) : nullptr;
    if (stream.capture && (from_pageable || to_pageable)) {  // the driver would have to stage it
        invalidate(stream);
        return cudaErrorStreamCaptureUnsupported;
    }
    const cudaStream_t handle = &stream == &null_stream() ? nullptr : &stream;
    if (from_pageable) {  // staged before the call returns
        auto staged =
            std::make_shared<std::vector<char>>(static_cast<const char*>(src), static_cast<const char*>(src) + bytes);
        const cudaError_t error = submit(handle, [=] { copy_now(dst, staged->data(), bytes); });
        if (error != cudaSuccess || !to_pageable) return error;
    } else if (cudaError_t error = submit(handle, [=] { copy_now(dst, src, bytes); })) {
        return error;
    }
    if (to_pageable) drain(&stream);  // returns when the copy is done
    return cudaSuccess;
}

cudaError_t set_async(void* dst, int value, size_t bytes, CUstream_st& stream) {
    if (bytes == 0) return cudaSuccess;
    if (memory_kind(dst) == MemoryKind::pageable) return cudaErrorInvalidValue;
    check_range(dst, bytes, "memset");
    return submit(&stream == &null_stream() ? nullptr : &stream, [=] {
        Quiet quiet;
        check_range(dst, bytes, "memset");
        DeviceAccess access;
        memset(dst, value, bytes);
    });
}

cudaError_t end_capture(CUstream_st& stream, cudaGraph_t* graph) {
    *graph = nullptr;
    std::shared_ptr<Capture> capture = stream.capture;
    if (!capture) return cudaErrorInvalidValue;
    if (capture->origin != &stream) return cudaErrorStreamCaptureUnmatched;
    if (capture->mode != cudaStreamCaptureModeRelaxed && capture->thread != std::this_thread::get_id())
        return cudaErrorStreamCaptureWrongThread;
    bool unjoined = false;
    for (auto& [member, dirty] : capture->streams) {
        unjoined |= member != &stream && dirty;
        member->capture = nullptr;
    }
    captures().erase(capture.get());
    if (capture->invalid) return cudaErrorStreamCaptureInvalidated;
    if (unjoined) return cudaErrorStreamCaptureUnjoined;
    *graph = new CUgraph_st{std::move(capture->work)};
    return cudaSuccess;
}

// An event of a capture brings the waiting stream into it, or joins the recording stream to the waiting one.
cudaError_t wait_for_captured(CUstream_st& stream, CUevent_st& event, const std::shared_ptr<Capture>& capture) {
    if (stream.capture && stream.capture != capture) return cudaErrorStreamCaptureIsolation;
    if (!stream.capture) {
        if (&stream == &null_stream()) return cudaErrorStreamCaptureUnsupported;
        stream.capture = capture;
        capture->streams[&stream] = true;
    }
    if (event.capture_stream != &stream && event.capture_position == capture->work.size())
        capture->streams[event.capture_stream] = false;
    return cudaSuccess;
}

}  // namespace

static bool queue_is_full(const CUstream_st& stream) {
    return stream.queue.size() >= static_cast<size_t>(setting("INFINILM_EMULATOR_QUEUE", 1024));
}

bool capturing(cudaStream_t stream) { return find(stream) && find(stream)->capture; }

// A capture concerns every thread, its own thread, or none, by its mode.
cudaError_t forbid_while_capturing() {
    for (Capture* capture : captures())
        if (capture->mode == cudaStreamCaptureModeGlobal ||
            (capture->mode == cudaStreamCaptureModeThreadLocal && capture->thread == std::this_thread::get_id())) {
            capture->invalid = true;
            return cudaErrorStreamCaptureUnsupported;
        }
    return cudaSuccess;
}

cudaError_t forbid_in_capture(cudaStream_t stream) {
    if (!capturing(stream)) return cudaSuccess;
    invalidate(*find(stream));
    return cudaErrorStreamCaptureUnsupported;
}

cudaError_t submit(cudaStream_t handle, Work work) {
    CUstream_st* stream = find(handle);
    if (!stream) return cudaErrorInvalidResourceHandle;
    if (stream->capture) {
        stream->capture->work.push_back(std::move(work));
        stream->capture->streams[stream] = true;
        return cudaSuccess;
    }
    DriverLock::wait(stream->device);
    if (handle) {
        if (queue_is_full(*stream)) {  // the call comes back when there is room
            const DriverLock lock(stream->device);
            while (queue_is_full(*stream)) run_one(*stream);
        }
        stream->queue.push_back(std::move(work));
        if (eager_streams()) drain(stream);
        return cudaSuccess;
    }
    if (cudaError_t error = forbid_while_capturing()) return error;  // the null stream would wait for the captured one
    drain_blocking();
    work();
    return cudaSuccess;
}

void drain(cudaStream_t stream) {
    while (!stream->queue.empty() || runs_elsewhere(*stream)) run_one(*stream);
    acquire_grids();
}
bool progress_device(int device) {
    for (cudaStream_t stream : streams()) {
        if (stream->device != device || stream->queue.empty() || runs_elsewhere(*stream)) continue;
        run_one(*stream);
        return true;
    }
    return false;
}
void drain_device(int device) {
    for (cudaStream_t stream : std::set(streams()))  // a copy: other host threads may run meanwhile
        if (find(stream) && stream->device == device) drain(stream);
    acquire_grids();
}
void drain_all() {
    for (cudaStream_t stream : std::set(streams()))
        if (find(stream)) drain(stream);
    acquire_grids();
}

// Every call of the API: the lock, the sticky error, then its own work, whose error is remembered.
template <class F>
cudaError_t call(F f) {
    Quiet quiet;  // arguments of kernels are freed here, which threads of the kernels have read
    std::lock_guard lock(runtime_lock());
    if (cudaError_t error = enter_context()) return error;
    const cudaError_t own = f();
    if (cudaError_t error = sticky_error()) return error;  // of a kernel that ran meanwhile
    return report(own);
}

}  // namespace infinilm::emulator

using namespace infinilm::emulator;

extern "C" {

cudaError_t cudaDeviceSynchronize() {
    return call([] {
        if (cudaError_t error = forbid_while_capturing()) return error;
        drain_device(current_device());
        return cudaSuccess;
    });
}

cudaError_t cudaMemcpy(void* dst, const void* src, size_t bytes, cudaMemcpyKind kind) {
    return call([=] {
        if (cudaError_t error = forbid_while_capturing()) return error;
        return copy_async(dst, src, bytes, kind, null_stream());
    });
}
cudaError_t cudaMemcpyAsync(void* dst, const void* src, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
    return call([=] {
        return find(stream) ? copy_async(dst, src, bytes, kind, *find(stream)) : cudaErrorInvalidResourceHandle;
    });
}
cudaError_t cudaMemcpy2DAsync(void* dst, size_t dst_pitch, const void* src, size_t src_pitch, size_t width,
                              size_t height, cudaMemcpyKind kind, cudaStream_t stream) {
    return call([=] {
        if (!find(stream)) return cudaErrorInvalidResourceHandle;
        if (width > dst_pitch || width > src_pitch) return cudaErrorInvalidValue;
        for (size_t row = 0; row < height; ++row)
            if (cudaError_t error =
                    copy_async(static_cast<char*>(dst) + row * dst_pitch,
                               static_cast<const char*>(src) + row * src_pitch, width, kind, *find(stream)))
                return error;
        return cudaSuccess;
    });
}
cudaError_t cudaMemset(void* dst, int value, size_t bytes) {
    return call([=] {
        if (cudaError_t error = forbid_while_capturing()) return error;
        return set_async(dst, value, bytes, null_stream());
    });
}
cudaError_t cudaMemsetAsync(void* dst, int value, size_t bytes, cudaStream_t stream) {
    return call(
        [=] { return find(stream) ? set_async(dst, value, bytes, *find(stream)) : cudaErrorInvalidResourceHandle; });
}

cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithFlags(stream, cudaStreamDefault); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
    return call([=] {
        *stream = new CUstream_st{flags, current_device(), {}, nullptr};
        streams().insert(*stream);
        return cudaSuccess;
    });
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    return call([=] {
        if (!stream || !find(stream)) return cudaErrorInvalidResourceHandle;
        drain(stream);
        streams().erase(stream);
        delete stream;
        return cudaSuccess;
    });
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    return call([=] {
        if (cudaError_t error = check_waitable(find(stream))) return error;
        if (!stream) drain_blocking();
        drain(find(stream));
        return cudaSuccess;
    });
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
    Quiet quiet;
    std::lock_guard lock(runtime_lock());
    if (cudaError_t error = sticky_error()) return error;
    CUstream_st* s = find(stream);
    if (cudaError_t error = check_waitable(s)) return report(error);
    if (s->queue.empty() && !runs_elsewhere(*s)) return cudaSuccess;
    run_one(*s);  // polling makes progress, one step a poll
    return cudaErrorNotReady;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    return call([=] {
        CUstream_st* s = find(stream);
        if (!s || !event) return cudaErrorInvalidResourceHandle;
        if (auto capture = event->capture.lock(); capture && captures().count(capture.get()))
            return wait_for_captured(*s, *event, capture);
        if (s->capture) {
            invalidate(*s);
            return cudaErrorStreamCaptureIsolation;
        }
        if (!event->marker) return cudaSuccess;
        return submit(stream, [marker = event->marker] { wait_for(marker); });
    });
}
cudaError_t infinilm_emulator_enqueue(cudaStream_t stream, void (*run)(void*), void* data, void (*discard)(void*)) {
    const std::shared_ptr<void> owned(data, discard);  // also after an error
    {
        std::lock_guard lock(runtime_lock());
        if (find(stream)) choose_device(find(stream)->device);  // as such libraries do in threads of their own
    }
    return call([=] { return submit(stream, [=] { run(owned.get()); }); });
}
uint64_t infinilm_emulator_uploaded_bytes() {
    std::lock_guard lock(runtime_lock());
    return uploaded_bytes;
}
void infinilm_emulator_give_way() {
    if (!runtime_lock().contended()) std::this_thread::yield();
    runtime_lock().give_way();
}

cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, cudaEventDefault); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
    return call([=] {
        *event = new CUevent_st;
        (*event)->flags = flags;
        return cudaSuccess;
    });
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    return call([=] {
        delete event;
        return cudaSuccess;
    });
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    return call([=] {
        CUstream_st* s = find(stream);
        if (!s || !event) return cudaErrorInvalidResourceHandle;
        event->marker = nullptr;
        event->capture = s->capture;
        if (s->capture) {
            event->capture_stream = s;
            event->capture_position = s->capture->work.size();
            return cudaSuccess;
        }
        auto marker = std::make_shared<Marker>(Marker{s});
        event->marker = marker;
        return submit(stream, [marker] {
            marker->done = true;
            marker->time = std::chrono::steady_clock::now();
        });
    });
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    return call([=] {
        if (!event->capture.expired()) return cudaErrorCapturedEvent;
        if (event->marker) wait_for(event->marker);
        return cudaSuccess;
    });
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
    Quiet quiet;
    std::lock_guard lock(runtime_lock());
    if (cudaError_t error = sticky_error()) return error;
    if (!event->capture.expired()) return report(cudaErrorCapturedEvent);
    if (!event->marker || event->marker->done) return cudaSuccess;
    run_one(*event->marker->stream);
    return cudaErrorNotReady;
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
    return call([=] {
        if ((start->flags | end->flags) & cudaEventDisableTiming || !start->marker || !end->marker)
            return cudaErrorInvalidResourceHandle;
        if (!start->marker->done || !end->marker->done) return cudaErrorNotReady;
        *milliseconds = std::chrono::duration<float, std::milli>(end->marker->time - start->marker->time).count();
        return cudaSuccess;
    });
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
    return call([=] {
        CUstream_st* s = find(stream);
        if (!s) return cudaErrorInvalidResourceHandle;
        if (!stream) return cudaErrorStreamCaptureUnsupported;
        if (s->capture) return cudaErrorInvalidValue;
        s->capture = std::make_shared<Capture>(Capture{s, mode, std::this_thread::get_id(), false, {}, {{s, false}}});
        captures().insert(s->capture.get());
        return cudaSuccess;
    });
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
    return call([=] { return find(stream) ? end_capture(*find(stream), graph) : cudaErrorInvalidResourceHandle; });
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
    std::lock_guard lock(runtime_lock());
    if (cudaError_t error = sticky_error()) return error;
    CUstream_st* s = find(stream);
    if (!s) return report(cudaErrorInvalidResourceHandle);
    *status = !s->capture           ? cudaStreamCaptureStatusNone
              : s->capture->invalid ? cudaStreamCaptureStatusInvalidated
                                    : cudaStreamCaptureStatusActive;
    return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
    return call([=] {
        drain_all();
        *exec = new CUgraphExec_st{std::make_shared<const std::vector<Work>>(graph->work)};
        return cudaSuccess;
    });
}
cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t stream) {
    return call([=] { return submit(stream, [] {}); });
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
    return call([=] {
        return submit(stream, [work = exec->work] {
            for (const Work& step : *work) step();
        });
    });
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
    return call([=] {
        drain_all();
        delete exec;
        return cudaSuccess;
    });
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    return call([=] {
        delete graph;
        return cudaSuccess;
    });
}

}  // extern "C"
