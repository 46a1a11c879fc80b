// A program whose calls are known: export_test.py computes the same tree. Multiboot, 32 bits, no interrupts.
typedef unsigned jump_buffer[3]; // EBX, ESP behind the return, EIP: all that these functions keep

int set_jump(jump_buffer to);
void long_jump(jump_buffer to);

__asm__("set_jump: mov 4(%esp), %eax; mov %ebx, (%eax); mov %ebp, 12(%eax); lea 4(%esp), %ecx; mov %ecx, 4(%eax)\n"
        "mov (%esp), %ecx; mov %ecx, 8(%eax); xor %eax, %eax; ret\n.size set_jump, .-set_jump\n"
        "long_jump: mov 4(%esp), %edx; mov (%edx), %ebx; mov 12(%edx), %ebp; mov 4(%edx), %esp; mov $1, %eax\n"
        "jmp *8(%edx)\n.size long_jump, .-long_jump\n"
        ".globl set_jump, long_jump\n.type set_jump, @function\n.type long_jump, @function\n");

static volatile int sink;
static unsigned buffer[4];

__attribute__((noinline)) static void leaf(void) { ++sink; }
__attribute__((noinline)) static void caught(void) { leaf(); }

__attribute__((noinline)) static int fibonacci(int n) {
    if (n < 2)
        return n;
    return fibonacci(n - 1) + fibonacci(n - 2);
}

__attribute__((noinline)) static void deep(int n) {
    if (n == 0)
        long_jump(buffer);
    deep(n - 1);
    leaf();
}

__attribute__((noinline)) static void guarded(int n) {
    if (set_jump(buffer) == 0)
        deep(n);
    else
        caught();
}

__attribute__((noinline)) static void last(void) {
    leaf();
    ++sink;
}
__attribute__((noinline, optimize("optimize-sibling-calls"))) static void tail(void) {
    ++sink;
    last();
}

void guest_main(void) {
    fibonacci(8);
    guarded(3);
    guarded(1);
    tail();
    leaf();
}
