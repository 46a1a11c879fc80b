// vtrace-mark: writes a value to the marker register of the vtrace machine that it runs in, as root.
//
//   vtrace-mark VALUE     0 to 0xffffffff
//   vtrace-mark --check   only says whether this is a vtrace machine
//
// Exit status: 0 done (or it is one), 1 not, 2 wrong arguments. One static file without a C library, for any x86-64
// Linux; it needs no driver. The register is described in vmm/devices/marker.h.
#include <asm/unistd.h>
#include <linux/errno.h>
#include <linux/fcntl.h>
#include <linux/mman.h>

enum { marker_port = 0x5654, marker_bytes = 4 };
static const unsigned long marker_page = 0xfed45000, marker_offset = 0x654, page_size = 0x1000;
static const unsigned int magic = 'V' | 'T' << 8 | 'R' << 16 | 'C' << 24;
enum { standard_output = 1, standard_error = 2 };
enum { prot_read_write = 3 }; // PROT_READ | PROT_WRITE

static long call(long number, long a, long b, long c, long d, long e, long f) {
    register long r10 __asm__("r10") = d;
    register long r8 __asm__("r8") = e;
    register long r9 __asm__("r9") = f;
    long result;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    return result;
}

static void say(int file, const char* text) {
    long length = 0;
    while (text[length])
        ++length;
    call(__NR_write, file, (long)text, length, 0, 0, 0);
}

static int equal(const char* a, const char* b) {
    while (*a && *a == *b)
        ++a, ++b;
    return *a == *b;
}

// Decimal, or hexadecimal after 0x; 0 if it is neither or has more than 32 bits.
static int parse(const char* text, unsigned int* value) {
    unsigned long base = 10, number = 0;
    if (text[0] == '0' && (text[1] == 'x' || text[1] == 'X'))
        base = 16, text += 2;
    if (!*text)
        return 0;
    for (; *text; ++text) {
        unsigned long digit = base;
        if (*text >= '0' && *text <= '9')
            digit = *text - '0';
        else if ((*text | 0x20) >= 'a' && (*text | 0x20) <= 'f')
            digit = (*text | 0x20) - 'a' + 10;
        if (digit >= base)
            return 0;
        number = number * base + digit;
        if (number > 0xffffffff)
            return 0;
    }
    *value = number;
    return 1;
}

// How an attempt by one of the ways to the register ended.
enum outcome { done, not_vtrace, no_way };

// A process may be let use ports.
static enum outcome by_port(int check, unsigned int value) {
    const unsigned short port = marker_port;
    unsigned int found;
    if (call(__NR_ioperm, port, marker_bytes, 1, 0, 0, 0) < 0 && call(__NR_iopl, 3, 0, 0, 0, 0, 0) < 0)
        return no_way;
    __asm__ volatile("inl %w1, %0" : "=a"(found) : "Nd"(port));
    if (found != magic)
        return not_vtrace;
    if (!check)
        __asm__ volatile("outl %0, %w1" : : "a"(value), "Nd"(port));
    return done;
}

static enum outcome by_memory(int check, unsigned int value) {
    const long file = call(__NR_openat, AT_FDCWD, (long)"/dev/mem", O_RDWR | O_SYNC, 0, 0, 0);
    if (file < 0)
        return no_way;
    const long page = call(__NR_mmap, 0, page_size, prot_read_write, MAP_SHARED, file, marker_page);
    call(__NR_close, file, 0, 0, 0, 0, 0);
    if (page < 0 && page > -(long)page_size)
        return no_way;
    volatile unsigned int* const marker = (volatile unsigned int*)(page + marker_offset);
    if (*marker != magic)
        return not_vtrace;
    if (!check)
        *marker = value;
    return done;
}

// The kernel splits this into bytes, of which only the first is a marker: for values of 8 bits.
static enum outcome by_port_file(int check, unsigned int value) {
    if (value > 0xff)
        return no_way;
    const long file = call(__NR_openat, AT_FDCWD, (long)"/dev/port", O_RDWR, 0, 0, 0);
    if (file < 0)
        return no_way;
    unsigned int found = 0;
    const unsigned char byte = value;
    enum outcome outcome = no_way;
    if (call(__NR_pread64, file, (long)&found, sizeof found, marker_port, 0, 0) == sizeof found)
        outcome = found == magic ? done : not_vtrace;
    if (outcome == done && !check &&
        call(__NR_pwrite64, file, (long)&byte, sizeof byte, marker_port, 0, 0) != sizeof byte)
        outcome = no_way;
    call(__NR_close, file, 0, 0, 0, 0, 0);
    return outcome;
}

static int run(long count, char** arguments) {
    unsigned int value = 0;
    const int check = count == 2 && equal(arguments[1], "--check");
    if (count != 2 || (!check && !parse(arguments[1], &value))) {
        say(standard_error, "usage: vtrace-mark VALUE    (0 to 0xffffffff)\n       vtrace-mark --check\n");
        return 2;
    }
    enum outcome outcome = by_port(check, value);
    if (outcome == no_way)
        outcome = by_memory(check, value);
    if (outcome == no_way)
        outcome = by_port_file(check, value);
    switch (outcome) {
    case done:
        if (check)
            say(standard_output, "vtrace-mark: this is a vtrace machine\n");
        return 0;
    case not_vtrace:
        say(standard_error, "vtrace-mark: this is not a vtrace machine: nothing answers at port 0x5654\n");
        return 1;
    case no_way:
        break;
    }
    say(standard_error, "vtrace-mark: no way to the marker register: ioperm, /dev/mem and /dev/port are all refused; "
                        "run it as root, and without kernel lockdown\n");
    return 1;
}

// Called with the stack as the kernel left it: the count of arguments, then the arguments.
__attribute__((used, noreturn)) static void start(long* stack) {
    const int status = run(stack[0], (char**)(stack + 1));
    for (;;)
        call(__NR_exit_group, status, 0, 0, 0, 0, 0);
}

__asm__(".globl _start\n"
        "_start:\n"
        "    xor %ebp, %ebp\n"
        "    mov %rsp, %rdi\n"
        "    and $-16, %rsp\n"
        "    call start\n");
