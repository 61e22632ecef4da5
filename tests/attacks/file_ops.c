// Logs what a process does to the files of one folder, and makes one of these operations fail as on
// a full disk. Preloaded, so that it sees libraries in Rust and C too:
//
//     FILE_OPS_ROOT=folder FILE_OPS_LOG=log LD_PRELOAD=file_ops.so python ...
//
// A record is a line "op\tpath\tnumber\tsize\n" and `size` bytes: the data of a write, the new name of
// a rename, the text of a mark. file_ops.py reads it.

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;
static long fail_at = 0, num_ops = 0;  // 0: none fails
static int log_fd = -1;

void file_ops_fail_at(long n) { fail_at = n; num_ops = 0; }
long file_ops_count(void) { return num_ops; }

static int is_inside(const char *path) {
    const char *root = getenv("FILE_OPS_ROOT");
    size_t size = root ? strlen(root) : 0;
    return size && !strncmp(path, root, size) && (!path[size] || path[size] == '/');
}

static int of_fd(int fd, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    long size = syscall(SYS_readlinkat, AT_FDCWD, link, path, PATH_MAX - 1);
    path[size < 0 ? 0 : size] = 0;
    return is_inside(path) && !strstr(path, " (deleted)");
}

static int of_name(int dir, const char *name, char *path) {
    char start[PATH_MAX] = "";
    if (name[0] != '/') {
        if (dir == AT_FDCWD) { if (!getcwd(start, sizeof start)) return 0; }
        else of_fd(dir, start);
    }
    snprintf(path, PATH_MAX, "%s%s%s", start, *start ? "/" : "", name);
    return is_inside(path);
}

static void put(const void *data, size_t size) {
    for (const char *at = data; size;) {
        long done = syscall(SYS_write, log_fd, at, size);
        if (done <= 0) abort();
        at += done, size -= done;
    }
}

static void record(const char *op, const char *path, long number, const void *data, size_t size) {
    char line[PATH_MAX + 64];
    if (log_fd < 0) {
        const char *name = getenv("FILE_OPS_LOG");
        if (!name) return;
        log_fd = syscall(SYS_openat, AT_FDCWD, name, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    }
    put(line, snprintf(line, sizeof line, "%s\t%s\t%ld\t%zu\n", op, path, number, size));
    put(data, size);
}

void file_ops_mark(const char *text) {
    pthread_mutex_lock(&guard);
    record("mark", "", 0, text, strlen(text));
    pthread_mutex_unlock(&guard);
}

// Whether the next operation fails. A full disk stays full; syncs and renames need little room.
static int fails(int needs_room) {
    if (!fail_at) return 0;
    num_ops++;
    if (num_ops != fail_at && !(needs_room && num_ops > fail_at)) return 0;
    errno = ENOSPC;
    return 1;
}

#define LOCKED(type, ...) \
    char path[PATH_MAX], other[PATH_MAX]; (void)path; (void)other; \
    pthread_mutex_lock(&guard); \
    type result = (type)-1; __VA_ARGS__ \
    int error = errno; pthread_mutex_unlock(&guard); errno = error; \
    return result;

static int do_open(int dir, const char *name, int flags, mode_t mode) {
    LOCKED(int, {
        int inside = (flags & (O_CREAT | O_TRUNC)) && of_name(dir, name, path);
        int is_new = inside && syscall(SYS_faccessat, AT_FDCWD, path, F_OK) < 0;
        if (!(is_new && (flags & O_CREAT) && fails(1)))
            result = syscall(SYS_openat, dir, name, flags, mode);
        if (result >= 0 && is_new) record("create", path, 0, "", 0);
        else if (result >= 0 && inside && (flags & O_TRUNC)) record("truncate", path, 0, "", 0);
    })
}

#define OPEN(name, dir, ...) \
    int name(__VA_ARGS__, int flags, ...) { \
        va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, int); va_end(rest); \
        return do_open(dir, file, flags, mode); \
    }
OPEN(open, AT_FDCWD, const char *file)
OPEN(open64, AT_FDCWD, const char *file)
OPEN(openat, dir, int dir, const char *file)
OPEN(openat64, dir, int dir, const char *file)

static ssize_t do_write(int fd, const void *data, size_t size, off_t at) {
    LOCKED(ssize_t, {
        int inside = of_fd(fd, path);
        int fail = inside && fails(1);
        if (fail && num_ops == fail_at && size > 1) size /= 2, fail = 0;  // what there is room for
        if (!fail)
            result = at < 0 ? syscall(SYS_write, fd, data, size) : syscall(SYS_pwrite64, fd, data, size, at);
        if (inside && result > 0)
            record("write", path, at < 0 ? lseek(fd, 0, SEEK_CUR) - result : at, data, result);
    })
}
ssize_t write(int fd, const void *data, size_t size) { return do_write(fd, data, size, -1); }
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) { return do_write(fd, data, size, at); }
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) { return do_write(fd, data, size, at); }
ssize_t writev(int fd, const struct iovec *parts, int num) {
    ssize_t done = 0;
    for (int i = 0; i < num; i++) {
        ssize_t now = do_write(fd, parts[i].iov_base, parts[i].iov_len, -1);
        if (now < 0) return done ? done : -1;
        done += now;
        if ((size_t)now < parts[i].iov_len) break;
    }
    return done;
}

int ftruncate(int fd, off_t size) {
    LOCKED(int, {
        result = syscall(SYS_ftruncate, fd, size);
        if (!result && of_fd(fd, path)) record("truncate", path, size, "", 0);
    })
}
int ftruncate64(int fd, off64_t size) { return ftruncate(fd, size); }
int truncate(const char *name, off_t size) {
    LOCKED(int, {
        result = syscall(SYS_truncate, name, size);
        if (!result && of_name(AT_FDCWD, name, path)) record("truncate", path, size, "", 0);
    })
}
int truncate64(const char *name, off64_t size) { return truncate(name, size); }

int fsync(int fd) {
    LOCKED(int, {
        int inside = of_fd(fd, path);
        if (!(inside && fails(0))) result = syscall(SYS_fsync, fd);
        if (!result && inside) record("sync", path, 0, "", 0);
    })
}
int fdatasync(int fd) { return fsync(fd); }

int renameat(int from, const char *a, int to, const char *b) {
    LOCKED(int, {
        int inside = of_name(from, a, path) & of_name(to, b, other);
        if (!(inside && fails(0))) result = syscall(SYS_renameat2, from, a, to, b, 0);
        if (!result && inside) record("rename", path, 0, other, strlen(other));
    })
}
int rename(const char *a, const char *b) { return renameat(AT_FDCWD, a, AT_FDCWD, b); }

int unlinkat(int dir, const char *name, int flags) {
    LOCKED(int, {
        int inside = of_name(dir, name, path);
        result = syscall(SYS_unlinkat, dir, name, flags);
        if (!result && inside) record("unlink", path, 0, "", 0);
    })
}
int unlink(const char *name) { return unlinkat(AT_FDCWD, name, 0); }
int rmdir(const char *name) { return unlinkat(AT_FDCWD, name, AT_REMOVEDIR); }

int mkdirat(int dir, const char *name, mode_t mode) {
    LOCKED(int, {
        int inside = of_name(dir, name, path);
        if (!(inside && fails(1))) result = syscall(SYS_mkdirat, dir, name, mode);
        if (!result && inside) record("mkdir", path, 0, "", 0);
    })
}
int mkdir(const char *name, mode_t mode) { return mkdirat(AT_FDCWD, name, mode); }
