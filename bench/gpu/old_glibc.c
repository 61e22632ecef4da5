/* Linked into the codec that travels, so that it asks for no symbol of a newer glibc than 2.14, whatever it was compiled under: glibc 2.34
   exports pthread_once under a new version and 2.32 a flag that spares atomic operations, which 0 does not. */
#include <pthread.h>

__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;

int old_pthread_once(pthread_once_t *once, void (*run)(void));
__asm__(".symver old_pthread_once,pthread_once@GLIBC_2.2.5");

__attribute__((visibility("hidden"))) int __wrap_pthread_once(pthread_once_t *once, void (*run)(void)) {
    return old_pthread_once(once, run);
}
