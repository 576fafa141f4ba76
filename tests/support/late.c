/* Loaded into a reader ahead of libc: holds a thread of UCX's still within a call while a test does something to the
 * peer. Before the call it leaves the file `asked` in the directory of KVX_TEST_LATE and waits for `ask`; after it,
 * `answered` and `go`. Only the first call of the kind that KVX_TEST_LATE_CALL names is held, for 20 s at most each
 * time, and none that is about a connection of the process with itself, as each agent of NIXL's makes one. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { OWN = 256 };

static atomic_int held, owns;
static struct sockaddr_in own[OWN];

int listen(int fd, int backlog)
{
    static int (*real)(int, int);
    struct sockaddr_in address;
    socklen_t length = sizeof(address);
    int n;

    if (!real) {
        *(void **)&real = dlsym(RTLD_NEXT, "listen");
    }
    if (!getsockname(fd, (struct sockaddr *)&address, &length) && address.sin_family == AF_INET) {
        n = atomic_fetch_add(&owns, 1);
        if (n < OWN) {
            own[n] = address;
        }
    }
    return real(fd, backlog);
}

static int is_own(const struct sockaddr_in *address)
{
    int n, count = atomic_load(&owns);

    for (n = 0; n < count && n < OWN; n++) {
        if (own[n].sin_port == address->sin_port &&
            (own[n].sin_addr.s_addr == INADDR_ANY || own[n].sin_addr.s_addr == address->sin_addr.s_addr)) {
            return 1;
        }
    }
    return 0;
}

static int ucx_calls(void *caller, const struct sockaddr *address)
{
    Dl_info info;

    return getenv("KVX_TEST_LATE") && address->sa_family == AF_INET && dladdr(caller, &info) && info.dli_fname &&
           strstr(info.dli_fname, "libuc");
}

static int chosen(const char *call)
{
    const char *wanted = getenv("KVX_TEST_LATE_CALL");

    return wanted && !strcmp(wanted, call) && !atomic_exchange(&held, 1);
}

static void path(char *into, size_t size, const char *name)
{
    snprintf(into, size, "%s/%s", getenv("KVX_TEST_LATE"), name);
}

static void hold(const char *tell, const char *wait)
{
    char file[4096];
    int saved = errno, n;

    path(file, sizeof(file), tell);
    close(open(file, O_CREAT | O_WRONLY, 0600));
    path(file, sizeof(file), wait);
    for (n = 0; n < 20000 && access(file, F_OK); n++) {
        usleep(1000);
    }
    errno = saved;
}

/* What UCX was last seen to connect to. */
static struct sockaddr_in peer;
static int peer_fd;
static atomic_int has_peer;

int connect(int fd, const struct sockaddr *address, socklen_t length)
{
    static int (*real)(int, const struct sockaddr *, socklen_t);
    int chose = 0, result;

    if (!real) {
        *(void **)&real = dlsym(RTLD_NEXT, "connect");
    }
    if (ucx_calls(__builtin_return_address(0), address) && !is_own((const struct sockaddr_in *)address)) {
        peer = *(const struct sockaddr_in *)address;
        peer_fd = fd;
        atomic_store(&has_peer, 1);
        chose = chosen("connect");
    }
    if (chose) {
        hold("asked", "ask");
    }
    result = real(fd, address, length);
    if (chose) {
        hold("answered", "go");
    }
    return result;
}

int getpeername(int fd, struct sockaddr *address, socklen_t *length)
{
    static int (*real)(int, struct sockaddr *, socklen_t *);
    const struct sockaddr_in *found = (const struct sockaddr_in *)address;
    int result;

    if (!real) {
        *(void **)&real = dlsym(RTLD_NEXT, "getpeername");
    }
    result = real(fd, address, length);
    if (!result && ucx_calls(__builtin_return_address(0), address) && atomic_load(&has_peer) &&
        found->sin_port == peer.sin_port && found->sin_addr.s_addr == peer.sin_addr.s_addr && chosen("getpeername")) {
        hold("asked", "ask");
        hold("answered", "go");
    }
    return result;
}

ssize_t send(int fd, const void *data, size_t size, int flags)
{
    static ssize_t (*real)(int, const void *, size_t, int);
    int chose;
    ssize_t result;

    if (!real) {
        *(void **)&real = dlsym(RTLD_NEXT, "send");
    }
    chose = atomic_load(&has_peer) && fd == peer_fd && chosen("send");
    if (chose) {
        hold("asked", "ask");
    }
    result = real(fd, data, size, flags);
    if (chose) {
        hold("answered", "go");
    }
    return result;
}
