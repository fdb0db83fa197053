/* What memory allows: the same arrays read and written as an update does, with hardly any arithmetic.
 * Compiled by benchmarks/rules.py: cc -O3 -march=native -shared -fPIC -pthread. Arrays are cut evenly over threads. */
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#define MOST 8
#define AHEAD_WORDS 256 /* of arrays that are written, as the kernels do; arrays that are only read are faster without */

struct work {
    void *in_place[MOST]; /* read and written */
    const void *read[MOST];
    size_t in_place_bytes[MOST], read_bytes[MOST];
    int in_place_count, read_count;
    uint64_t sum;
};

/* Blocks of all arrays in turn, as an update touches them: 1024 bytes of the widest at a time. */
static void *run(void *argument) {
    struct work *w = argument;
    size_t widest = 1;
    for (int k = 0; k < w->in_place_count; ++k)
        if (w->in_place_bytes[k] > widest) widest = w->in_place_bytes[k];
    const size_t blocks = widest / 1024 + 1;
    uint64_t sum = 0;
    for (size_t block = 0; block < blocks; ++block) {
        for (int k = 0; k < w->read_count; ++k) {
            const size_t words = w->read_bytes[k] / 8;
            const size_t begin = words / blocks * block, end = block + 1 == blocks ? words : words / blocks * (block + 1);
            const uint64_t *p = w->read[k];
            uint64_t s = 0;
            for (size_t i = begin; i < end; ++i) s += p[i];
            sum += s;
        }
        for (int k = 0; k < w->in_place_count; ++k) {
            const size_t words = w->in_place_bytes[k] / 8;
            const size_t begin = words / blocks * block, end = block + 1 == blocks ? words : words / blocks * (block + 1);
            uint64_t *p = w->in_place[k];
            for (size_t i = begin; i < end; i += 8) __builtin_prefetch(p + i + AHEAD_WORDS, 1);
            for (size_t i = begin; i < end; ++i) p[i] ^= 1;
        }
    }
    w->sum = sum;
    return NULL;
}

/* Bytes are of whole arrays; addresses of their beginnings. */
uint64_t bound(void **in_place, const size_t *in_place_bytes, int in_place_count, void **read, const size_t *read_bytes,
               int read_count, int threads) {
    struct work work[64];
    pthread_t ids[64];
    uint64_t sum = 0;
    if (threads > 64) threads = 64;
    for (int t = 0; t < threads; ++t) {
        struct work *w = &work[t];
        w->in_place_count = in_place_count;
        w->read_count = read_count;
        for (int k = 0; k < in_place_count; ++k) {
            w->in_place_bytes[k] = in_place_bytes[k] / threads / 64 * 64;
            w->in_place[k] = (char *)in_place[k] + w->in_place_bytes[k] * t;
        }
        for (int k = 0; k < read_count; ++k) {
            w->read_bytes[k] = read_bytes[k] / threads / 64 * 64;
            w->read[k] = (char *)read[k] + w->read_bytes[k] * t;
        }
        if (t > 0) pthread_create(&ids[t], NULL, run, w);
    }
    run(&work[0]);
    for (int t = 1; t < threads; ++t) pthread_join(ids[t], NULL);
    for (int t = 0; t < threads; ++t) sum += work[t].sum;
    return sum;
}
