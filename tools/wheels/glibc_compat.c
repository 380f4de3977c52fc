/* The few symbols that gcc 12's libstdc++ asks of a newer glibc than the one wheels are for (2.28), by what that one has.
 * Linked into a wheel's libraries where they need one of them, see sysroot.py. All are hidden: they serve these alone. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

struct stat;

#pragma GCC visibility push(hidden)

/* glibc 2.32 has it, so that counters of references need no atomic instruction while there is one thread. Engines have
 * several. */
char __libc_single_threaded = 0;

/* glibc 2.30. A condition of older ones waits by the clock of the wall alone. Where that clock is set forward while a
 * thread waits, the wait ends as if woken by chance, which callers of pthread_cond_wait expect at any time; where it is
 * set back, a wait, which is asked for in pieces of a second, is longer by as much. */
int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                           const struct timespec* deadline) {
    const int64_t second = 1000000000;
    struct timespec now, wall;
    if (clock_gettime(clock, &now) || clock_gettime(CLOCK_REALTIME, &wall)) return EINVAL;
    int64_t left = (deadline->tv_sec - now.tv_sec) * second + deadline->tv_nsec - now.tv_nsec;
    const int64_t wait = left < 0 ? 0 : left > second ? second : left;
    const int64_t until = wall.tv_nsec + wait;
    wall.tv_sec += until / second;
    wall.tv_nsec = until % second;
    const int result = pthread_cond_timedwait(condition, mutex, &wall);
    if (result != ETIMEDOUT) return result;
    if (clock_gettime(clock, &now)) return EINVAL;
    left = (deadline->tv_sec - now.tv_sec) * second + deadline->tv_nsec - now.tv_nsec;
    return left <= 0 ? ETIMEDOUT : 0;
}

/* glibc 2.33; before, these were macros of its headers. The kernel's struct is that of the C library on 64 bits. */
int fstatat(int folder, const char* path, struct stat* result, int flags) {
    return (int)syscall(SYS_newfstatat, folder, path, result, flags);
}
int stat(const char* path, struct stat* result) { return fstatat(AT_FDCWD, path, result, 0); }
int lstat(const char* path, struct stat* result) { return fstatat(AT_FDCWD, path, result, AT_SYMLINK_NOFOLLOW); }
int fstat(int file, struct stat* result) { return fstatat(file, "", result, AT_EMPTY_PATH); }
int stat64(const char* path, struct stat* result) __attribute__((alias("stat")));
int lstat64(const char* path, struct stat* result) __attribute__((alias("lstat")));
int fstat64(int file, struct stat* result) __attribute__((alias("fstat")));
int fstatat64(int folder, const char* path, struct stat* result, int flags) __attribute__((alias("fstatat")));

/* glibc 2.36. std::random_device asks for it. */
uint32_t arc4random(void) {
    uint32_t value;
    if (getentropy(&value, sizeof value)) __builtin_trap();
    return value;
}

#pragma GCC visibility pop
