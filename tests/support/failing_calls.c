/* A library for LD_PRELOAD that makes system calls on the files below one folder fail.

   fail_calls(root, trigger, rules, count) starts anew: calls are counted from the first open with O_CREAT of a path
   that contains `trigger`. A rule {first, last, error, done} makes the calls with the numbers first to last fail
   with `error`, before or after (`done`) they take effect. failing_calls() returns the number of calls counted, and
   stops. call_name(n) names a call. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define MAX_CALLS 4096
#define MAX_FDS 4096

struct rule { int first, last, error, done; };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char root[4096], trigger[256];
static struct rule rules[16];
static int rule_count, armed, counting, calls;
static char ours[MAX_FDS];
static char names[MAX_CALLS][96];

void fail_calls(const char *folder, const char *text, const struct rule *given, int count) {
    pthread_mutex_lock(&lock);
    snprintf(root, sizeof root, "%s", folder);
    snprintf(trigger, sizeof trigger, "%s", text);
    memcpy(rules, given, sizeof(struct rule) * count);
    rule_count = count, calls = 0, counting = 0, armed = 1;
    pthread_mutex_unlock(&lock);
}

int failing_calls(void) {
    pthread_mutex_lock(&lock);
    int counted = calls;
    armed = counting = 0;
    pthread_mutex_unlock(&lock);
    return counted;
}

const char *call_name(int n) { return n >= 1 && n < MAX_CALLS ? names[n] : ""; }

static int below(const char *path) { return armed && path && !strncmp(path, root, strlen(root)); }

/* Count a call; return the error with which it fails (0: none), and in *done whether it takes effect. */
static int next(const char *what, const char *path, int *done) {
    int error = 0;
    *done = 0;
    pthread_mutex_lock(&lock);
    if (counting && armed && calls + 1 < MAX_CALLS) {
        ++calls;
        snprintf(names[calls], sizeof names[calls], "%s %s", what, path ? path + strlen(root) : "");
        for (int i = 0; i < rule_count && !error; i++)
            if (rules[i].first <= calls && calls <= rules[i].last) error = rules[i].error, *done = rules[i].done;
    }
    pthread_mutex_unlock(&lock);
    return error;
}

#define REAL(name) ((typeof(&name))dlsym(RTLD_NEXT, #name))
#define FAILING(type, what, path, call)                                                                              \
    do {                                                                                                             \
        int done, error = next(what, path, &done);                                                                   \
        if (error && !done) { errno = error; return (type)-1; }                                                      \
        type result = (call);                                                                                        \
        if (error) { errno = error; return (type)-1; }                                                               \
        return result;                                                                                               \
    } while (0)

static int opened(const char *name, int at, const char *path, int flags, mode_t mode) {
    int (*real)(int, const char *, int, ...) = (int (*)(int, const char *, int, ...))dlsym(RTLD_NEXT, "openat64");
    if (!below(path)) return real(at, path, flags, mode);
    if (flags & O_CREAT && strstr(path, trigger)) counting = 1;
    int done, error = next(name, path, &done);
    if (error && !done) { errno = error; return -1; }
    int fd = real(at, path, flags, mode);
    if (error) {
        if (fd >= 0) close(fd);
        errno = error;
        return -1;
    }
    if (fd >= 0 && fd < MAX_FDS) ours[fd] = 1;
    return fd;
}

#define OPEN(name, parameters, at)                                                                                   \
    int name parameters {                                                                                            \
        va_list more;                                                                                                \
        va_start(more, flags);                                                                                       \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0;                                      \
        va_end(more);                                                                                                \
        return opened(flags & O_CREAT ? "create" : "open", at, path, flags, mode);                                   \
    }
OPEN(open, (const char *path, int flags, ...), AT_FDCWD)
OPEN(open64, (const char *path, int flags, ...), AT_FDCWD)
OPEN(openat, (int folder, const char *path, int flags, ...), folder)
OPEN(openat64, (int folder, const char *path, int flags, ...), folder)

#define ON_FD(type, name, parameters, arguments)                                                                     \
    type name parameters {                                                                                           \
        if (!armed || fd < 0 || fd >= MAX_FDS || !ours[fd]) return REAL(name) arguments;                             \
        FAILING(type, #name, NULL, REAL(name) arguments);                                                            \
    }
ON_FD(ssize_t, read, (int fd, void *data, size_t size), (fd, data, size))
ON_FD(ssize_t, pread64, (int fd, void *data, size_t size, off64_t at), (fd, data, size, at))
ON_FD(ssize_t, write, (int fd, const void *data, size_t size), (fd, data, size))
ON_FD(ssize_t, pwrite64, (int fd, const void *data, size_t size, off64_t at), (fd, data, size, at))
ON_FD(ssize_t, pwritev64, (int fd, const struct iovec *data, int count, off64_t at), (fd, data, count, at))
ON_FD(ssize_t, pwritev64v2, (int fd, const struct iovec *data, int count, off64_t at, int flags),
      (fd, data, count, at, flags))
ON_FD(ssize_t, preadv64v2, (int fd, const struct iovec *data, int count, off64_t at, int flags),
      (fd, data, count, at, flags))
ON_FD(int, fsync, (int fd), (fd))
ON_FD(int, fdatasync, (int fd), (fd))
ON_FD(int, ftruncate64, (int fd, off64_t size), (fd, size))
ON_FD(int, fstat, (int fd, struct stat *status), (fd, status))
ON_FD(int, fstat64, (int fd, struct stat64 *status), (fd, status))

int close(int fd) {
    if (!armed || fd < 0 || fd >= MAX_FDS || !ours[fd]) return REAL(close)(fd);
    ours[fd] = 0;
    int done, error = next("close", NULL, &done), result = REAL(close)(fd); /* Linux always closes */
    if (!error) return result;
    errno = error;
    return -1;
}

#define ON_PATH(type, name, parameters, path, arguments)                                                             \
    type name parameters {                                                                                           \
        if (!below(path)) return REAL(name) arguments;                                                               \
        FAILING(type, #name, path, REAL(name) arguments);                                                            \
    }
ON_PATH(int, link, (const char *from, const char *to), to, (from, to))
ON_PATH(int, linkat, (int a, const char *from, int b, const char *to, int flags), to, (a, from, b, to, flags))
ON_PATH(int, unlink, (const char *path), path, (path))
ON_PATH(int, unlinkat, (int at, const char *path, int flags), path, (at, path, flags))
ON_PATH(int, mkdir, (const char *path, mode_t mode), path, (path, mode))
ON_PATH(int, rename, (const char *from, const char *to), to, (from, to))
ON_PATH(int, renameat2, (int a, const char *from, int b, const char *to, unsigned flags), to,
        (a, from, b, to, flags))
ON_PATH(int, stat, (const char *path, struct stat *status), path, (path, status))
ON_PATH(int, stat64, (const char *path, struct stat64 *status), path, (path, status))
ON_PATH(int, lstat, (const char *path, struct stat *status), path, (path, status))
ON_PATH(int, lstat64, (const char *path, struct stat64 *status), path, (path, status))
ON_PATH(int, fstatat, (int at, const char *path, struct stat *status, int flags), path, (at, path, status, flags))
ON_PATH(int, fstatat64, (int at, const char *path, struct stat64 *status, int flags), path,
        (at, path, status, flags))
