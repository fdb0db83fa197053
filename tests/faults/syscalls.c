/* Loaded before the C library: chosen calls of pread and pwrite fail, move less, or are held up. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <string.h>
#include <sys/types.h>

/* What happens to calls number `first` to `last`, counted from 1 for reads and writes apart. */
static struct plan {
  int write;
  long first, last;
  int error;       /* fail with this errno, where not 0 */
  long limit;      /* say that at most these bytes were moved, where not negative; whole pages are, for direct I/O */
  int held;        /* until the next plan is set */
} plan;
static long calls[2];
static long plans;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;

void fault_set(int write, long first, long last, int error, long limit, int held) {
  pthread_mutex_lock(&mutex);
  plan = (struct plan){write, first, last, error, limit, held};
  plans++;
  memset(calls, 0, sizeof calls);
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&mutex);
}

long fault_calls(int write) {
  pthread_mutex_lock(&mutex);
  long count = calls[write];
  pthread_mutex_unlock(&mutex);
  return count;
}

/* Returns the errno to fail with, or 0 and at most how many bytes to own up to. */
static int meet(int write, ssize_t* limit) {
  pthread_mutex_lock(&mutex);
  long number = ++calls[write];
  struct plan now = plan;
  int meant = now.write == write && number >= now.first && number <= now.last;
  for (long mine = plans; meant && now.held && plans == mine;) pthread_cond_wait(&changed, &mutex);
  pthread_mutex_unlock(&mutex);
  *limit = SSIZE_MAX;
  if (!meant) return 0;
  if (now.limit >= 0) *limit = now.limit;
  return now.error;
}

static size_t pages(size_t count, ssize_t limit) {
  return count <= (size_t)limit ? count : ((size_t)limit + 4095) / 4096 * 4096;
}

typedef ssize_t (*reader)(int, void*, size_t, off_t);
typedef ssize_t (*writer)(int, const void*, size_t, off_t);

ssize_t pread(int fd, void* memory, size_t count, off_t offset) {
  ssize_t limit;
  int error = meet(0, &limit);
  if (error) return errno = error, -1;
  ssize_t moved = ((reader)dlsym(RTLD_NEXT, "pread"))(fd, memory, pages(count, limit), offset);
  return moved < limit ? moved : limit;
}

ssize_t pwrite(int fd, const void* memory, size_t count, off_t offset) {
  ssize_t limit;
  int error = meet(1, &limit);
  if (error) return errno = error, -1;
  ssize_t moved = ((writer)dlsym(RTLD_NEXT, "pwrite"))(fd, memory, pages(count, limit), offset);
  return moved < limit ? moved : limit;
}

ssize_t pread64(int fd, void* memory, size_t count, off_t offset) { return pread(fd, memory, count, offset); }
ssize_t pwrite64(int fd, const void* memory, size_t count, off_t offset) { return pwrite(fd, memory, count, offset); }
