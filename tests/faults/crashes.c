/* Loaded before the C library: the process ends, or the call fails, at the n-th call that changes a file system. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

static long calls, fatal;
static int failure; /* errno of the call, or 0: the process is killed before it */
static const char* names[4096];
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

void crash_set(long number, int error) {
  pthread_mutex_lock(&mutex);
  calls = 0, fatal = number, failure = error;
  pthread_mutex_unlock(&mutex);
}

long crash_calls(void) { return calls; }

const char* crash_name(long number) { return number <= calls && number < 4096 ? names[number] : ""; }

static int meet(const char* name) {
  pthread_mutex_lock(&mutex);
  long number = ++calls;
  if (number < 4096) names[number] = name;
  int error = number == fatal ? failure : 0;
  if (number == fatal && error == 0) kill(getpid(), SIGKILL);
  pthread_mutex_unlock(&mutex);
  return error;
}

/* A call that returns -1 and sets errno. */
#define CALL(type, name, parameters, ...)                                        \
  type name parameters {                                                         \
    int error = meet(#name);                                                     \
    if (error) return errno = error, (type) - 1;                                 \
    return ((type(*) parameters)dlsym(RTLD_NEXT, #name))(__VA_ARGS__);           \
  }

/* Of files alone: ranks talk by sockets, which are no part of the table. */
ssize_t write(int fd, const void* p, size_t n) {
  struct stat found;
  int error = fstat(fd, &found) == 0 && S_ISREG(found.st_mode) ? meet("write") : 0;
  if (error) return errno = error, -1;
  return ((ssize_t(*)(int, const void*, size_t))dlsym(RTLD_NEXT, "write"))(fd, p, n);
}
CALL(ssize_t, pwrite, (int fd, const void* p, size_t n, off_t o), fd, p, n, o)
CALL(ssize_t, pwrite64, (int fd, const void* p, size_t n, off64_t o), fd, p, n, o)
CALL(ssize_t, copy_file_range, (int a, off64_t* x, int b, off64_t* y, size_t n, unsigned f), a, x, b, y, n, f)
CALL(int, fsync, (int fd), fd)
CALL(int, fdatasync, (int fd), fd)
CALL(int, rename, (const char* a, const char* b), a, b)
CALL(int, renameat, (int f, const char* a, int g, const char* b), f, a, g, b)
CALL(int, unlink, (const char* a), a)
CALL(int, unlinkat, (int f, const char* a, int flags), f, a, flags)
CALL(int, rmdir, (const char* a), a)
CALL(int, mkdir, (const char* a, mode_t m), a, m)
CALL(int, mkdirat, (int f, const char* a, mode_t m), f, a, m)

/* These return the error itself. */
#define ALLOCATE(name, offset)                                                            \
  int name(int fd, offset start, offset length) {                                         \
    int error = meet(#name);                                                              \
    return error ? error : ((int (*)(int, offset, offset))dlsym(RTLD_NEXT, #name))(fd, start, length); \
  }

ALLOCATE(posix_fallocate, off_t)
ALLOCATE(posix_fallocate64, off64_t)

/* Files that are made. */
#define OPEN(name, parameters, ...)                                              \
  int name parameters {                                                          \
    va_list rest;                                                                \
    va_start(rest, flags);                                                       \
    mode_t mode = flags & O_CREAT ? va_arg(rest, mode_t) : 0;                    \
    va_end(rest);                                                                \
    int error = flags & O_CREAT ? meet(#name) : 0;                               \
    if (error) return errno = error, -1;                                         \
    return ((int(*) parameters)dlsym(RTLD_NEXT, #name))(__VA_ARGS__, mode);      \
  }

OPEN(open, (const char* path, int flags, ...), path, flags)
OPEN(open64, (const char* path, int flags, ...), path, flags)
OPEN(openat, (int folder, const char* path, int flags, ...), folder, path, flags)
OPEN(openat64, (int folder, const char* path, int flags, ...), folder, path, flags)
