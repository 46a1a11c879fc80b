// The init of a Linux guest, whose calls are known: with libc's setjmp and longjmp, a signal, and the kernel in between.
#include <setjmp.h>
#include <signal.h>
#include <sys/reboot.h>

#define FUNCTION __attribute__((noinline, noclone))

static jmp_buf buffer;
static volatile int sink;

FUNCTION static void leaf(void) { ++sink; }
FUNCTION static void caught(void) {
    leaf();
    ++sink;
}
FUNCTION static int fibonacci(int n) {
    if (n < 2)
        return n;
    return fibonacci(n - 1) + fibonacci(n - 2);
}
FUNCTION static void deep(int n) {
    if (n == 0)
        longjmp(buffer, 1);
    deep(n - 1);
    leaf();
}
FUNCTION static void guarded(int n) {
    if (setjmp(buffer) == 0)
        deep(n);
    else
        caught();
    ++sink;
}
static void handler(int number) {
    (void)number;
    leaf();
    ++sink;
}
FUNCTION static void raiser(void) {
    raise(SIGUSR1);
    ++sink;
}

int main(void) {
    signal(SIGUSR1, handler);
    fibonacci(6);
    guarded(3);
    raiser();
    leaf();
    reboot(RB_POWER_OFF);
}
