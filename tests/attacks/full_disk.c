// Lets an operation on the files of one folder fail as on a full disk. Preloaded, so that libraries
// in Rust fail too:  FULL_DISK_ROOT=folder LD_PRELOAD=full_disk.so python ...
//
// full_disk_at(n) has the n-th operation from then on fail. A write first takes half of its bytes,
// and what needs room goes on failing; syncs and renames fail only if they are the n-th. 0: none.

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static long fail_at = 0, num_ops = 0;

void full_disk_at(long n) { fail_at = n; num_ops = 0; }
long full_disk_count(void) { return num_ops; }

static int is_below(const char *path) {
    const char *root = getenv("FULL_DISK_ROOT");
    size_t size = root ? strlen(root) : 0;
    return size && !strncmp(path, root, size) && (!path[size] || path[size] == '/');
}

static int of_descriptor(int fd) {
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    long size = syscall(SYS_readlinkat, AT_FDCWD, link, path, sizeof path - 1);
    path[size < 0 ? 0 : size] = 0;
    return is_below(path);
}

static int of_name(int dir, const char *name) {
    return name[0] != '/' && dir != AT_FDCWD ? of_descriptor(dir) : is_below(name);
}

static int fails(int needs_room) {
    if (!fail_at) return 0;
    num_ops++;
    if (num_ops != fail_at && !(needs_room && num_ops > fail_at)) return 0;
    errno = ENOSPC;
    return 1;
}

static int do_open(int dir, const char *name, int flags, mode_t mode) {
    int is_new = (flags & O_CREAT) && of_name(dir, name) &&
                 syscall(SYS_faccessat, dir, name, F_OK) < 0;
    return is_new && fails(1) ? -1 : syscall(SYS_openat, dir, name, flags, mode);
}

#define OPEN(name, dir, ...) \
    int name(__VA_ARGS__, int flags, ...) { \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = va_arg(rest, int); \
        va_end(rest); \
        return do_open(dir, file, flags, mode); \
    }
OPEN(open, AT_FDCWD, const char *file)
OPEN(open64, AT_FDCWD, const char *file)
OPEN(openat, dir, int dir, const char *file)
OPEN(openat64, dir, int dir, const char *file)

ssize_t write(int fd, const void *data, size_t size) {
    if (of_descriptor(fd) && fails(1)) {
        if (num_ops != fail_at || size < 2) return -1;
        size /= 2;
    }
    return syscall(SYS_write, fd, data, size);
}

ssize_t writev(int fd, const struct iovec *parts, int num) {
    ssize_t done = 0;
    for (int i = 0; i < num; i++) {
        ssize_t now = write(fd, parts[i].iov_base, parts[i].iov_len);
        if (now < 0) return done ? done : -1;
        done += now;
        if ((size_t)now < parts[i].iov_len) break;
    }
    return done;
}

static ssize_t do_pwrite(int fd, const void *data, size_t size, off_t at) {
    if (of_descriptor(fd) && fails(1)) return -1;
    return syscall(SYS_pwrite64, fd, data, size, at);
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) { return do_pwrite(fd, data, size, at); }
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) { return do_pwrite(fd, data, size, at); }

int fsync(int fd) { return of_descriptor(fd) && fails(0) ? -1 : 0; }
int fdatasync(int fd) { return fsync(fd); }

int rename(const char *from, const char *to) {
    return is_below(to) && fails(0) ? -1 : syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0);
}

int mkdir(const char *name, mode_t mode) {
    return is_below(name) && fails(1) ? -1 : syscall(SYS_mkdirat, AT_FDCWD, name, mode);
}
