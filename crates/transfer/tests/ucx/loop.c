/*
 * The fastest plain loop over UCX's get and put: what our own path is measured against.
 *
 *   cc -O2 -o loop loop.c -ldl && ./loop <libucp.so.0> <transports> <milliseconds per point> <busy|sleep>
 *
 * Two processes. The child owns memory and serves it; the parent reads and writes it from one busy thread, a batch of
 * operations at a time, and prints one JSON line per size, direction and batch. Puts are complete after a flush. The
 * last word says how the owner waits for messages. Busy is best with a core to spare, sleep without: a comparison should
 * take the better of both.
 *
 * Declarations are our own, after the OpenUCX headers of 1.13 to 1.22 (ucp/api/ucp.h, ucp_def.h), so that no header
 * package is needed. Structs are passed by pointer with field masks, hence zeroed arrays of 64-bit words suffice; the
 * comments name the field at each index.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

typedef signed char status_t; /* a packed enum */
typedef void *handle_t;

#define REGION ((size_t)64 << 20)
#define BATCH_MAX 4

static status_t (*config_read)(const char *, const char *, handle_t *);
static status_t (*config_modify)(handle_t, const char *, const char *);
static void (*config_release)(handle_t);
static status_t (*init_version)(unsigned, unsigned, const uint64_t *, handle_t, handle_t *);
static status_t (*worker_create)(handle_t, const uint64_t *, handle_t *);
static status_t (*worker_get_address)(handle_t, handle_t *, size_t *);
static status_t (*worker_get_efd)(handle_t, int *);
static status_t (*worker_arm)(handle_t);
static unsigned (*worker_progress)(handle_t);
static status_t (*ep_create)(handle_t, const uint64_t *, handle_t *);
static handle_t (*ep_flush)(handle_t, const uint64_t *);
static status_t (*mem_map)(handle_t, const uint64_t *, handle_t *);
static status_t (*rkey_pack)(handle_t, handle_t, handle_t *, size_t *);
static status_t (*rkey_unpack)(handle_t, const void *, handle_t *);
static handle_t (*get_nbx)(handle_t, void *, size_t, uint64_t, handle_t, const uint64_t *);
static handle_t (*put_nbx)(handle_t, const void *, size_t, uint64_t, handle_t, const uint64_t *);
static status_t (*request_check)(handle_t);
static void (*request_free)(handle_t);

static void check(const char *what, status_t status)
{
    if (status != 0) {
        fprintf(stderr, "%s: status %d\n", what, status);
        exit(1);
    }
}

static void resolve(handle_t library, const char *name, void *place)
{
    void *symbol = dlsym(library, name);
    if (symbol == NULL) {
        fprintf(stderr, "no %s\n", name);
        exit(1);
    }
    memcpy(place, &symbol, sizeof(symbol));
}

static void load(const char *path)
{
    handle_t library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        fprintf(stderr, "%s\n", dlerror());
        exit(1);
    }
    resolve(library, "ucp_config_read", &config_read);
    resolve(library, "ucp_config_modify", &config_modify);
    resolve(library, "ucp_config_release", &config_release);
    resolve(library, "ucp_init_version", &init_version);
    resolve(library, "ucp_worker_create", &worker_create);
    resolve(library, "ucp_worker_get_address", &worker_get_address);
    resolve(library, "ucp_worker_get_efd", &worker_get_efd);
    resolve(library, "ucp_worker_arm", &worker_arm);
    resolve(library, "ucp_worker_progress", &worker_progress);
    resolve(library, "ucp_ep_create", &ep_create);
    resolve(library, "ucp_ep_flush_nbx", &ep_flush);
    resolve(library, "ucp_mem_map", &mem_map);
    resolve(library, "ucp_rkey_pack", &rkey_pack);
    resolve(library, "ucp_ep_rkey_unpack", &rkey_unpack);
    resolve(library, "ucp_get_nbx", &get_nbx);
    resolve(library, "ucp_put_nbx", &put_nbx);
    resolve(library, "ucp_request_check_status", &request_check);
    resolve(library, "ucp_request_free", &request_free);
}

static handle_t start(const char *tls, handle_t *context)
{
    handle_t config, worker;
    check("ucp_config_read", config_read(NULL, NULL, &config));
    check("TLS", config_modify(config, "TLS", tls));
    check("RNDV_THRESH", config_modify(config, "RNDV_THRESH", "inf"));
    if (strstr(tls, "posix") != NULL) {
        check("MM_ERROR_HANDLING", config_modify(config, "MM_ERROR_HANDLING", "y"));
    }
    uint64_t params[16] = {1 /* mask: features */, 1 << 1 | 1 << 4 /* RMA, wake-up */};
    check("ucp_init", init_version(1, 13, params, config, context));
    config_release(config);
    uint64_t worker_params[32] = {1 /* mask: thread mode */, 0 /* single */};
    check("ucp_worker_create", worker_create(*context, worker_params, &worker));
    return worker;
}

static void *region(void)
{
    void *memory = mmap(NULL, REGION, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (memory == MAP_FAILED) {
        perror("mmap");
        exit(1);
    }
    memset(memory, 0x5a, REGION);
    return memory;
}

static void transfer_all(int fd, void *bytes, size_t len, ssize_t (*step)(int, void *, size_t))
{
    for (size_t done = 0; done < len;) {
        ssize_t n = step(fd, (char *)bytes + done, len - done);
        if (n <= 0) {
            exit(1);
        }
        done += n;
    }
}

static ssize_t write_step(int fd, void *bytes, size_t len)
{
    return write(fd, bytes, len);
}

static void own(const char *path, const char *tls, int busy, int out)
{
    handle_t context, address, memory, key;
    size_t lens[2];
    int efd;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    load(path);
    handle_t worker = start(tls, &context);
    uint64_t base = (uint64_t)region();
    uint64_t map[8] = {3 /* mask: address, length */, base, REGION};
    check("ucp_mem_map", mem_map(context, map, &memory));
    check("ucp_rkey_pack", rkey_pack(context, memory, &key, &lens[1]));
    check("ucp_worker_get_address", worker_get_address(worker, &address, &lens[0]));
    check("ucp_worker_get_efd", worker_get_efd(worker, &efd));
    transfer_all(out, lens, sizeof(lens), write_step);
    transfer_all(out, &base, sizeof(base), write_step);
    transfer_all(out, address, lens[0], write_step);
    transfer_all(out, key, lens[1], write_step);
    for (;;) {
        while (worker_progress(worker) != 0) {
        }
        if (!busy && worker_arm(worker) == 0) {
            struct pollfd fds = {.fd = efd, .events = POLLIN};
            poll(&fds, 1, 1000);
        }
    }
}

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec * 1e-9;
}

static void finish(handle_t worker, handle_t request)
{
    if (request == NULL) {
        return;
    }
    if ((intptr_t)request < 0 && (intptr_t)request >= -100) {
        check("request", (status_t)(intptr_t)request);
    }
    while (request_check(request) == 1) {
        worker_progress(worker);
    }
    check("request", request_check(request));
    request_free(request);
}

static void on_error(void *argument, handle_t ep, status_t status)
{
    (void)argument;
    (void)ep;
    check("endpoint", status);
}

int main(int count, char **words)
{
    if (count != 5) {
        fprintf(stderr, "usage: %s <libucp> <transports> <milliseconds per point> <busy|sleep>\n", words[0]);
        return 2;
    }
    double seconds = atof(words[3]) / 1000;
    int pipes[2];
    if (pipe(pipes) != 0) {
        return 1;
    }
    /* Before UCX is loaded: it does not survive a fork. */
    pid_t child = fork();
    if (child == 0) {
        own(words[1], words[2], strcmp(words[4], "busy") == 0, pipes[1]);
    }
    size_t lens[2];
    uint64_t base;
    handle_t context, ep, key;
    transfer_all(pipes[0], lens, sizeof(lens), read);
    transfer_all(pipes[0], &base, sizeof(base), read);
    char *address = malloc(lens[0]), *packed = malloc(lens[1]);
    transfer_all(pipes[0], address, lens[0], read);
    transfer_all(pipes[0], packed, lens[1], read);

    load(words[1]);
    handle_t worker = start(words[2], &context);
    /* mask: address, error mode, error handler | address | mode PEER | handler, argument */
    uint64_t ep_params[16] = {7, (uint64_t)address, 1, (uint64_t)on_error, 0};
    check("ucp_ep_create", ep_create(worker, ep_params, &ep));
    check("ucp_ep_rkey_unpack", rkey_unpack(ep, packed, &key));
    char *local = region();
    const uint64_t param[16] = {0};
    finish(worker, ep_flush(ep, param));

    for (int put = 0; put < 2; put++) {
        for (int batch = 1; batch <= BATCH_MAX; batch += BATCH_MAX - 1) {
            for (size_t size = 64 << 10; size <= 16 << 20; size *= 4) {
                uint64_t operations = 0;
                double begin = 0, end;
                /* The first batches set things up: four of them do not count. */
                for (int64_t round = -4;; round++) {
                    if (round == 0) {
                        begin = now();
                    }
                    handle_t requests[BATCH_MAX];
                    for (int i = 0; i < batch; i++) {
                        requests[i] = put ? put_nbx(ep, local + i * size, size, base + i * size, key, param)
                                          : get_nbx(ep, local + i * size, size, base + i * size, key, param);
                    }
                    handle_t flush = put ? ep_flush(ep, param) : NULL;
                    for (int i = 0; i < batch; i++) {
                        finish(worker, requests[i]);
                    }
                    finish(worker, flush);
                    end = now();
                    if (round >= 0) {
                        operations += batch;
                        if (end - begin >= seconds) {
                            break;
                        }
                    }
                }
                printf("{\"side\":\"c\",\"tls\":\"%s\",\"op\":\"%s\",\"in_flight\":%d,\"bytes\":%zu,\"gb_s\":%.3f}\n",
                       words[2], put ? "put" : "get", batch, size, operations * size / (end - begin) / 1e9);
                fflush(stdout);
            }
        }
    }
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    return 0;
}
