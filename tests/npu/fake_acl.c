// A fake of the ACL runtime (libascendcl) on host memory. The compiler checks each prototype against the wheel's headers.
//
// The work of a stream is a queue of items. No item runs when it is queued: it runs when the host waits for it, or when
// an item that runs waits for it. So a missing wait between streams reads memory that is not written yet. `fake_early`
// selects the other extreme: when the host waits, all other streams run first.
//
// An event is a position in a queue: it is complete if the queue ran that far. A captured model is a list of lanes, one
// for each stream; a replay is one item that runs the lanes. A task group is an item with its own items, which an update
// replaces in the order of the update's stream.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "acl/acl.h"
#include "acl/acl_op_compiler.h"

// Python's own declarations need its headers, which many machines lack.
typedef struct PyObject PyObject;
extern PyObject *PyObject_CallNoArgs(PyObject *);
extern int PyGILState_Check(void), PyGILState_Ensure(void);
extern void PyGILState_Release(int), Py_IncRef(PyObject *), Py_DecRef(PyObject *), *PyEval_SaveThread(void);
extern void PyEval_RestoreThread(void *);

typedef struct Items Items;
typedef struct Stream Stream;
typedef struct Model Model;
typedef struct { uint64_t value; Stream *stream; Model *model; int lane; size_t position; double time; } Event;
typedef enum { CALL, COPY, FILL, WAIT, LANE_WAIT, VALUE_WAIT, VALUE_WRITE, REPLAY, GROUP, UPDATE } Kind;
typedef struct {
    Kind kind;
    void *target;        // CALL: the function; COPY, FILL, VALUE_*: memory; WAIT: Stream; REPLAY: Model; else Items
    const void *source;  // COPY: memory; UPDATE: the new Items
    size_t size;         // COPY, FILL: bytes; WAIT, LANE_WAIT: the position; VALUE_*: the value
    int value;           // FILL: the byte; LANE_WAIT: the lane
} Item;
struct Items { Item *list; size_t count, capacity, done, base; bool running; };  // list[i] is at the position base + i
struct Stream { Items queue, *into, *updated; Model *model; int lane, id; };  // into: where new items go
enum { LANES = 16, STREAMS = 4096 };
struct Model { Items first, lanes[LANES]; size_t joined[LANES]; int count; Stream *streams[LANES]; aclmdlRICaptureMode mode; pthread_t thread; };

static pthread_mutex_t engine;  // recursive; held while items run
static Stream *streams[STREAMS];
static int stream_count, early;
static Model *capturing;
static aclError failure;  // of an item; the next synchronisation returns it
static char message[512];
static size_t used_bytes;
static __thread int device;

__attribute__((constructor)) static void start(void) {
    pthread_mutexattr_t recursive;
    pthread_mutexattr_init(&recursive);
    pthread_mutexattr_settype(&recursive, PTHREAD_MUTEX_RECURSIVE);
    pthread_mutex_init(&engine, &recursive);
}

// A thread that holds Python's lock must not wait for the engine: the items that run need that lock.
static void lock(void) {
    if (pthread_mutex_trylock(&engine) == 0) return;
    void *state = PyGILState_Check() ? PyEval_SaveThread() : NULL;
    pthread_mutex_lock(&engine);
    if (state) PyEval_RestoreThread(state);
}

static aclError unlock(aclError error) {
    pthread_mutex_unlock(&engine);
    return error;
}

static aclError refuse(aclError error, const char *reason) {
    snprintf(message, sizeof message, "fake ACL: %s", reason);
    return error;
}

static void push(Items *items, Item item) {
    if (items->count - items->base == items->capacity) {
        memmove(items->list, items->list + items->done - items->base, (items->count - items->done) * sizeof(Item));
        items->base = items->done;
        items->capacity = 2 * (items->count - items->base) + 64;
        items->list = realloc(items->list, items->capacity * sizeof(Item));
    }
    items->list[items->count++ - items->base] = item;
}

static void release(Items *items) {
    int lock_state = PyGILState_Ensure();
    for (size_t i = items->done; i < items->count; i++) {
        if (items->list[i].kind == CALL) Py_DecRef(items->list[i].target);
        if (items->list[i].kind == GROUP) release(items->list[i].target);
    }
    PyGILState_Release(lock_state);
    free(items->list);
    memset(items, 0, sizeof *items);
}

// Running

static void run(Item *item, Model *model, size_t *progress);

void fake_fail(const char *reason);

static void run_queue(Items *queue, size_t end) {
    if (queue->running) return fake_fail("a stream waits for itself");
    queue->running = true;
    while (queue->done < end) {
        Item item = queue->list[queue->done - queue->base];  // a copy: an item may add items, which moves the list
        run(&item, NULL, NULL);
        queue->done++;  // after the run: an event behind this item is not complete before
        if (item.kind == CALL) {
            int lock_state = PyGILState_Ensure();
            Py_DecRef(item.target);
            PyGILState_Release(lock_state);
        }
    }
    queue->running = false;
}

static void run_lane(Model *model, size_t *progress, int lane, size_t end) {
    while (progress[lane] < end) run(&model->lanes[lane].list[progress[lane]++], model, progress);
}

static bool writes(Items *queue, void *address) {
    for (size_t i = queue->done; i < queue->count; i++) {
        Item *item = &queue->list[i - queue->base];
        if (item->kind == VALUE_WRITE && item->target == address) return true;
    }
    return false;
}

// External events of torch_npu are values in memory: a record writes 1, a wait waits for 1 and writes 0.
static void wait_value(Item *item) {
    while (*(uint64_t *)item->target < item->size) {
        int writer = 0;
        while (writer < stream_count && (streams[writer]->queue.running || !writes(&streams[writer]->queue, item->target)))
            writer++;
        if (writer == stream_count)
            return fake_fail("a replay waits for an external event that nothing records: graph.update was not called");
        run_queue(&streams[writer]->queue, streams[writer]->queue.done + 1);
    }
}

static void replay(Model *model) {
    size_t progress[LANES] = {0};
    for (size_t i = 0; i < model->first.count; i++) run(&model->first.list[i], model, progress);
    for (int i = 0; i < model->count; i++) {
        int lane = early ? model->count - 1 - i : i;
        run_lane(model, progress, lane, model->lanes[lane].count);
    }
}

static void run(Item *item, Model *model, size_t *progress) {
    switch (item->kind) {
        case CALL: {
            int lock_state = PyGILState_Ensure();
            PyObject *result = PyObject_CallNoArgs(item->target);  // the function catches its errors and calls fake_fail
            if (result) Py_DecRef(result);
            PyGILState_Release(lock_state);
            break;
        }
        case COPY: memmove(item->target, item->source, item->size); break;
        case FILL: memset(item->target, item->value, item->size); break;
        case WAIT:
            if (((Stream *)item->target)->queue.done < item->size) run_queue(&((Stream *)item->target)->queue, item->size);
            break;
        case LANE_WAIT: run_lane(model, progress, item->value, item->size); break;
        case VALUE_WAIT: wait_value(item); break;
        case VALUE_WRITE: *(uint64_t *)item->target = item->size; break;
        case REPLAY: replay(item->target); break;
        case GROUP:
            for (size_t i = 0; i < ((Items *)item->target)->count; i++) run(&((Items *)item->target)->list[i], model, progress);
            break;
        case UPDATE: {
            Items *group = item->target, *update = (Items *)item->source;
            release(group);
            *group = *update;
            free(update);
        }
    }
}

static bool is_refused(Stream *stream) {
    if (stream && stream->model) return true;
    if (!capturing || capturing->mode == ACL_MODEL_RI_CAPTURE_MODE_RELAXED) return false;
    return capturing->mode == ACL_MODEL_RI_CAPTURE_MODE_GLOBAL || pthread_equal(capturing->thread, pthread_self());
}

// Python's functions around the items that run for one wait of the host.
static PyObject *on_start, *on_end;
void fake_hooks(PyObject *start, PyObject *end) { on_start = start, on_end = end; }

static void call(PyObject *function) {
    int lock_state = PyGILState_Ensure();
    PyObject *result = PyObject_CallNoArgs(function);
    if (result) Py_DecRef(result);
    PyGILState_Release(lock_state);
}

// The host waits for `stream` (all streams: NULL) to reach `end`.
static aclError synchronize(Stream *stream, size_t end) {
    lock();
    if (is_refused(stream)) return unlock(refuse(ACL_ERROR_RT_STREAM_CAPTURED, "the host waits during a capture"));
    bool works = false;
    for (int i = 0; i < stream_count; i++) works |= streams[i]->queue.done < streams[i]->queue.count;
    if (works && on_start) call(on_start);
    for (int i = 0; i < stream_count; i++)
        if ((early || !stream) && streams[i] != stream && !streams[i]->queue.running)
            run_queue(&streams[i]->queue, streams[i]->queue.count);
    if (stream && stream->queue.done < end) run_queue(&stream->queue, end);
    if (works && on_end) call(on_end);
    aclError error = failure;
    failure = ACL_SUCCESS;
    return unlock(error);
}

static aclError enqueue(Stream *stream, Item item) {
    lock();
    push(stream->into, item);
    return unlock(ACL_SUCCESS);
}

// For Python: queue a call (`first`: of a capture, before its other items), fail, select the order, read the state.
void fake_call(void *handle, PyObject *function, int first) {
    Stream *stream = handle;
    Py_IncRef(function);
    if (!first || !stream->model) {
        enqueue(stream, (Item){CALL, function});
    } else {
        lock();
        push(&stream->model->first, (Item){CALL, function});
        unlock(ACL_SUCCESS);
    }
}
void fake_fail(const char *reason) { failure = refuse(ACL_ERROR_RT_AICORE_EXCEPTION, reason); }
void *fake_capture(void *stream) { return ((Stream *)stream)->model; }
void fake_early(int value) { early = value; }
size_t fake_used_bytes(void) { return used_bytes; }
// 0: no queued item of the stream uses memory; 1: some does; 2: the stream is in a capture.
int fake_state(void *handle) {
    lock();
    Items *queue = &((Stream *)handle)->queue;
    int state = ((Stream *)handle)->model ? 2 : 0;
    for (size_t i = queue->done; !state && i < queue->count; i++) state = queue->list[i - queue->base].kind != WAIT;
    unlock(ACL_SUCCESS);
    return state;
}

// Device

aclError aclInit(const char *path) { return ACL_SUCCESS; }
aclError aclFinalize(void) { return ACL_SUCCESS; }
void aclAppLog(aclLogLevel level, const char *function, const char *file, uint32_t line, const char *format, ...) {}
const char *aclGetRecentErrMsg(void) { return message; }
// torch_npu knows only the chips that exist. Other callers get a name that tells them that this is no NPU.
const char *aclrtGetSocName(void) {
    Dl_info caller;
    bool is_torch_npu = dladdr(__builtin_return_address(0), &caller) && strstr(caller.dli_fname, "torch_npu");
    return is_torch_npu ? "Ascend910B3" : "Fake of Ascend910B3";
}
aclError aclrtGetDeviceCount(uint32_t *count) { return *count = 1, ACL_SUCCESS; }
aclError aclrtGetDevice(int32_t *id) { return *id = device, ACL_SUCCESS; }
aclError aclrtSetDevice(int32_t id) { return device = id, id ? ACL_ERROR_RT_INVALID_DEVICEID : ACL_SUCCESS; }
aclError aclrtResetDevice(int32_t id) { return ACL_SUCCESS; }
aclError aclrtGetCurrentContext(aclrtContext *context) { return *context = &device, ACL_SUCCESS; }
aclError aclrtSetCurrentContext(aclrtContext context) { return ACL_SUCCESS; }
aclError aclrtGetPrimaryCtxState(int32_t id, uint32_t *flags, int32_t *active) { return *active = 1, ACL_SUCCESS; }
aclError aclrtDeviceCanAccessPeer(int32_t *can, int32_t id, int32_t peer) { return *can = 0, ACL_SUCCESS; }
aclError aclGetDeviceCapability(uint32_t id, aclDeviceInfo info, int64_t *value) { return *value = 24, ACL_SUCCESS; }
aclError aclrtSetOpWaitTimeout(uint32_t seconds) { return ACL_SUCCESS; }
aclError aclrtSetOpExecuteTimeOut(uint32_t seconds) { return ACL_SUCCESS; }
aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode mode) { return ACL_SUCCESS; }
aclError aclrtPeekAtLastError(aclrtLastErrLevel level) { return ACL_SUCCESS; }
aclError aclrtGetLastError(aclrtLastErrLevel level) { return ACL_SUCCESS; }
aclError aclrtGetSysParamOpt(aclSysParamOpt option, int64_t *value) { return *value = 0, ACL_SUCCESS; }
aclError aclrtSetSysParamOpt(aclSysParamOpt option, int64_t value) { return ACL_SUCCESS; }
aclError aclrtCtxSetSysParamOpt(aclSysParamOpt option, int64_t value) { return ACL_SUCCESS; }
aclError aclmdlInitDump(void) { return ACL_SUCCESS; }
aclError aclmdlFinalizeDump(void) { return ACL_SUCCESS; }
aclError aclSetCompileopt(aclCompileOpt option, const char *value) { return ACL_SUCCESS; }

// Memory

static size_t total_bytes(void) {
    const char *gibibytes = getenv("FAKE_NPU_GIB");
    return (gibibytes ? strtoul(gibibytes, NULL, 10) : 64) << 30;
}

aclError aclrtMalloc(void **pointer, size_t size, aclrtMemMallocPolicy policy) {
    size_t whole = (size + 511) / 512 * 512;
    if (__atomic_add_fetch(&used_bytes, whole, __ATOMIC_SEQ_CST) > total_bytes() ||
        !(*pointer = aligned_alloc(512, whole + 512))) {
        __atomic_sub_fetch(&used_bytes, whole, __ATOMIC_SEQ_CST);
        return refuse(ACL_ERROR_RT_MEMORY_ALLOCATION, "out of memory");
    }
    *(size_t *)*pointer = whole;  // the size is before the memory
    *pointer = (char *)*pointer + 512;
    return ACL_SUCCESS;
}
aclError aclrtMallocAlign32(void **pointer, size_t size, aclrtMemMallocPolicy policy) { return aclrtMalloc(pointer, size, policy); }

aclError aclrtFree(void *pointer) {
    synchronize(NULL, 0);  // refused during a capture: the memory is then freed at once
    void *block = (char *)pointer - 512;
    __atomic_sub_fetch(&used_bytes, *(size_t *)block, __ATOMIC_SEQ_CST);
    free(block);
    return ACL_SUCCESS;
}

aclError aclrtGetMemInfo(aclrtMemAttr attribute, size_t *available, size_t *total) {
    *total = total_bytes();
    *available = *total - used_bytes;
    return ACL_SUCCESS;
}

// Page-locked host memory, which torch_npu recognises by its attributes.
enum { PINNED = 65536 };
static char *pinned[PINNED], *pinned_end[PINNED];

aclError aclrtMallocHost(void **pointer, size_t size) {
    lock();
    int slot = 0;
    while (slot < PINNED && pinned[slot]) slot++;
    if (slot == PINNED || !(*pointer = aligned_alloc(512, (size + 511) / 512 * 512)))
        return unlock(ACL_ERROR_RT_MEMORY_ALLOCATION);
    pinned[slot] = *pointer;
    pinned_end[slot] = pinned[slot] + size;
    return unlock(ACL_SUCCESS);
}
aclError aclrtMallocHostWithCfg(void **pointer, uint64_t size, aclrtMallocConfig *config) { return aclrtMallocHost(pointer, size); }

aclError aclrtFreeHost(void *pointer) {
    lock();
    for (int i = 0; i < PINNED; i++)
        if (pinned[i] == pointer) pinned[i] = NULL;
    free(pointer);
    return unlock(ACL_SUCCESS);
}

aclError aclrtPointerGetAttributes(const void *pointer, aclrtPtrAttributes *attributes) {
    attributes->location.type = ACL_MEM_LOCATION_TYPE_UNREGISTERED;
    for (int i = 0; i < PINNED; i++)
        if (pinned[i] && pinned[i] <= (char *)pointer && (char *)pointer < pinned_end[i])
            attributes->location.type = ACL_MEM_LOCATION_TYPE_HOST;
    return ACL_SUCCESS;
}

aclError aclrtMemcpy(void *target, size_t limit, const void *source, size_t size, aclrtMemcpyKind kind) {
    if (is_refused(NULL)) return refuse(ACL_ERROR_RT_STREAM_CAPTURED, "aclrtMemcpy during a capture");
    memmove(target, source, size);
    return ACL_SUCCESS;
}
aclError aclrtMemset(void *target, size_t limit, int32_t value, size_t size) { return memset(target, value, size), ACL_SUCCESS; }
aclError aclrtMemcpyAsync(void *target, size_t limit, const void *source, size_t size, aclrtMemcpyKind kind, aclrtStream stream) {
    return enqueue(stream, (Item){COPY, target, source, size});
}
aclError aclrtMemsetAsync(void *target, size_t limit, int32_t value, size_t size, aclrtStream stream) {
    return enqueue(stream, (Item){FILL, target, NULL, size, value});
}

// Streams

aclError aclrtCreateStream(aclrtStream *stream) {
    lock();
    if (stream_count == STREAMS) return unlock(refuse(ACL_ERROR_RT_STREAM_NO_CB_REG, "no stream is left"));
    Stream *created = calloc(1, sizeof *created);
    created->into = &created->queue;
    created->id = stream_count;
    *stream = streams[stream_count++] = created;
    return unlock(ACL_SUCCESS);
}
aclError aclrtCreateStreamWithConfig(aclrtStream *stream, uint32_t priority, uint32_t flag) { return aclrtCreateStream(stream); }
aclError aclrtDestroyStream(aclrtStream stream) { return ACL_SUCCESS; }  // events may refer to it
aclError aclrtDestroyStreamForce(aclrtStream stream) { return ACL_SUCCESS; }
aclError aclrtSetStreamFailureMode(aclrtStream stream, uint64_t mode) { return ACL_SUCCESS; }
aclError aclrtSetStreamOverflowSwitch(aclrtStream stream, uint32_t flag) { return ACL_SUCCESS; }
aclError aclrtStreamGetId(aclrtStream stream, int32_t *id) { return *id = ((Stream *)stream)->id, ACL_SUCCESS; }
aclError aclrtSynchronizeStream(aclrtStream stream) { return synchronize(stream, ((Stream *)stream)->queue.count); }
aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t timeout) { return aclrtSynchronizeStream(stream); }
aclError aclrtSynchronizeDevice(void) { return synchronize(NULL, 0); }
aclError aclrtSynchronizeDeviceWithTimeout(int32_t timeout) { return synchronize(NULL, 0); }
aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus *status) {
    Items *queue = &((Stream *)stream)->queue;
    *status = queue->done < queue->count ? ACL_STREAM_STATUS_NOT_READY : ACL_STREAM_STATUS_COMPLETE;
    return ACL_SUCCESS;
}

// Events. A record takes no lock: torch_npu records events while it holds the lock of its allocator.

aclError aclrtCreateEventExWithFlag(aclrtEvent *event, uint32_t flag) {
    Event *created = calloc(1, sizeof *created);
    return *event = created, ACL_SUCCESS;
}
aclError aclrtCreateEventWithFlag(aclrtEvent *event, uint32_t flag) { return aclrtCreateEventExWithFlag(event, flag); }
aclError aclrtDestroyEvent(aclrtEvent event) { return ACL_SUCCESS; }  // queued items may refer to it

aclError aclrtRecordEvent(aclrtEvent handle, aclrtStream stream_handle) {
    Event *event = handle;
    Stream *stream = stream_handle;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    event->time = now.tv_sec * 1e3 + now.tv_nsec / 1e6;
    event->stream = stream;
    event->model = stream->model;
    event->lane = stream->lane;
    event->position = event->model ? stream->model->lanes[stream->lane].count : stream->queue.count;
    return ACL_SUCCESS;
}

aclError aclrtResetEvent(aclrtEvent event, aclrtStream stream) { return ACL_SUCCESS; }
aclError aclrtValueWrite(void *address, uint64_t value, uint32_t flag, aclrtStream stream) {
    return enqueue(stream, (Item){VALUE_WRITE, address, NULL, value});
}
aclError aclrtValueWait(void *address, uint64_t value, uint32_t flag, aclrtStream stream) {
    return enqueue(stream, (Item){VALUE_WAIT, address, NULL, value});
}

static aclError join_capture(Stream *stream, Model *model) {
    if (stream->model) return stream->model == model ? ACL_SUCCESS : ACL_ERROR_STREAM_CAPTURE_CONFLICT;
    if (model->count == LANES) return refuse(ACL_ERROR_RT_INSUFFICIENT_INPUT_ARRAY, "a capture has too many streams");
    stream->model = model;
    stream->lane = model->count;
    stream->into = &model->lanes[model->count];
    model->streams[model->count++] = stream;
    return ACL_SUCCESS;
}

aclError aclrtStreamWaitEvent(aclrtStream stream_handle, aclrtEvent handle) {
    Event *event = handle;
    Stream *stream = stream_handle;
    if (!event->stream) return ACL_SUCCESS;  // never recorded
    if (event->model && event->model != capturing)
        return refuse(ACL_ERROR_RT_EVENT_CAPTURED, "the event was recorded in a capture that ended");
    if (!event->model && stream->model)
        return refuse(ACL_ERROR_RT_CAPTURE_DEPENDENCY, "a capture waits for an event that was recorded before it");
    if (!event->model) return event->stream == stream ? ACL_SUCCESS : enqueue(stream, (Item){WAIT, event->stream, NULL, event->position});
    lock();
    aclError error = join_capture(stream, event->model);
    if (error || stream->lane == event->lane) return unlock(error);
    if (event->model->joined[event->lane] < event->position) event->model->joined[event->lane] = event->position;
    return unlock(enqueue(stream, (Item){LANE_WAIT, NULL, NULL, event->position, event->lane}));
}

static bool is_complete(Event *event) {
    return !event->stream || event->stream->queue.done >= event->position;
}
aclError aclrtSynchronizeEvent(aclrtEvent handle) {
    Event *event = handle;
    if (event->model) return refuse(ACL_ERROR_RT_EVENT_CAPTURED, "the host waits for an event of a capture");
    return event->stream ? synchronize(event->stream, event->position) : ACL_SUCCESS;
}
aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus *status) {
    *status = is_complete(event) ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
    return ACL_SUCCESS;
}
aclError aclrtQueryEventWaitStatus(aclrtEvent event, aclrtEventWaitStatus *status) {
    *status = is_complete(event) ? ACL_EVENT_WAIT_STATUS_COMPLETE : ACL_EVENT_WAIT_STATUS_NOT_READY;
    return ACL_SUCCESS;
}
aclError aclrtEventElapsedTime(float *milliseconds, aclrtEvent first, aclrtEvent last) {
    *milliseconds = (float)(((Event *)last)->time - ((Event *)first)->time);  // of the calls: the fake has no device time
    return ACL_SUCCESS;
}

// Captured models

aclError aclmdlRICaptureBegin(aclrtStream stream, aclmdlRICaptureMode mode) {
    lock();
    if (capturing) return unlock(refuse(ACL_ERROR_RT_MODEL_CAPTURED, "another capture has not ended"));
    Model *model = calloc(1, sizeof *model);
    model->mode = mode;
    model->thread = pthread_self();
    capturing = model;
    return unlock(join_capture(stream, model));
}

aclError aclmdlRICaptureEnd(aclrtStream stream, aclmdlRI *result) {
    lock();
    Model *model = ((Stream *)stream)->model;
    if (!model || model->streams[0] != stream)
        return unlock(refuse(ACL_ERROR_RT_STREAM_CAPTURE_UNMATCHED, "the capture did not begin on this stream"));
    bool unjoined = false;
    for (int i = 0; i < model->count; i++) {
        unjoined |= i && model->lanes[i].count > model->joined[i];
        model->streams[i]->into = &model->streams[i]->queue;
        model->streams[i]->model = NULL;
    }
    capturing = NULL;
    *result = model;
    return unlock(unjoined ? refuse(ACL_ERROR_RT_STREAM_UNJOINED, "the capture ends before a second stream is joined") : ACL_SUCCESS);
}

aclError aclmdlRICaptureGetInfo(aclrtStream stream, aclmdlRICaptureStatus *status, aclmdlRI *model) {
    *status = ((Stream *)stream)->model ? ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE : ACL_MODEL_RI_CAPTURE_STATUS_NONE;
    *model = ((Stream *)stream)->model;
    return ACL_SUCCESS;
}

aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode *mode) {
    static __thread aclmdlRICaptureMode current;
    aclmdlRICaptureMode previous = current;
    current = *mode;
    *mode = previous;
    return ACL_SUCCESS;
}

aclError aclmdlRIExecuteAsync(aclmdlRI model, aclrtStream stream) { return enqueue(stream, (Item){REPLAY, model}); }

aclError aclmdlRIDestroy(aclmdlRI handle) {
    synchronize(NULL, 0);  // replays may be queued
    Model *model = handle;
    release(&model->first);
    for (int i = 0; i < model->count; i++) release(&model->lanes[i]);
    return ACL_SUCCESS;  // events may refer to the model
}

aclError aclmdlRICaptureTaskGrpBegin(aclrtStream handle) {
    Stream *stream = handle;
    if (!stream->model) return refuse(ACL_ERROR_RT_STREAM_NOT_CAPTURED, "a task group begins outside of a capture");
    stream->into = calloc(1, sizeof(Items));
    return ACL_SUCCESS;
}

aclError aclmdlRICaptureTaskGrpEnd(aclrtStream handle, aclrtTaskGrp *group) {
    Stream *stream = handle;
    if (!stream->model || stream->into == &stream->model->lanes[stream->lane])
        return refuse(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "a task group ends that did not begin");
    *group = stream->into;
    stream->into = &stream->model->lanes[stream->lane];
    return enqueue(stream, (Item){GROUP, *group});
}

aclError aclmdlRICaptureTaskUpdateBegin(aclrtStream handle, aclrtTaskGrp group) {
    Stream *stream = handle;
    stream->updated = group;
    stream->into = calloc(1, sizeof(Items));
    return ACL_SUCCESS;
}

aclError aclmdlRICaptureTaskUpdateEnd(aclrtStream handle) {
    Stream *stream = handle;
    Items *update = stream->into;
    stream->into = &stream->queue;
    if (update->count != stream->updated->count)
        return refuse(ACL_ERROR_RT_MODEL_UPDATE_FAILED, "an update has another number of tasks than its group");
    return enqueue(stream, (Item){UPDATE, stream->updated, update});
}
