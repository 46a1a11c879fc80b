// A plugin for QEMU's TCG (plugin API 1, as in Debian 12's QEMU 7.2) that writes every taken branch of a guest as a BTS
// record: from, to and flags of 8 bytes each. With `out=FILE` it writes them, without it only counts.
//
// TCG translates blocks of straight code. Where a block's successor does not begin where the block ends, a branch was taken:
// from = the address of the block's last instruction. TCG differs from a Branch Trace Store in ways that compare.py knows:
// - it ends blocks where no branch is (page ends, system instructions, too many instructions); a branch to the instruction
//   that follows it can't be told from that, so neither is written;
// - each iteration of a REP instruction counts as a branch to itself;
// - an exception leaves a block in its middle: `from` is then the block's last instruction, not the one that faulted.
//
// No header of QEMU is needed: these are the few prototypes of its qemu-plugin.h that are used here.
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef uint64_t qemu_plugin_id_t;
typedef struct {
    const char *target_name;
    struct {
        int min, cur;
    } version;
    bool system_emulation;
    union {
        struct {
            int smp_vcpus, max_vcpus;
        } system;
    };
} qemu_info_t;
struct qemu_plugin_tb;
struct qemu_plugin_insn;
enum { QEMU_PLUGIN_CB_NO_REGS = 0 };

void qemu_plugin_register_vcpu_tb_trans_cb(qemu_plugin_id_t id, void (*callback)(qemu_plugin_id_t, struct qemu_plugin_tb *));
void qemu_plugin_register_vcpu_tb_exec_cb(struct qemu_plugin_tb *tb, void (*callback)(unsigned vcpu, void *data), int flags, void *data);
void qemu_plugin_register_atexit_cb(qemu_plugin_id_t id, void (*callback)(qemu_plugin_id_t, void *), void *data);
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *tb);
uint64_t qemu_plugin_tb_vaddr(const struct qemu_plugin_tb *tb);
struct qemu_plugin_insn *qemu_plugin_tb_get_insn(const struct qemu_plugin_tb *tb, size_t index);
uint64_t qemu_plugin_insn_vaddr(const struct qemu_plugin_insn *insn);
size_t qemu_plugin_insn_size(const struct qemu_plugin_insn *insn);

#define EXPORT __attribute__((visibility("default")))
EXPORT int qemu_plugin_version = 1;

struct record {
    uint64_t from, to, flags;
};

struct block {
    uint64_t start, last, end; // first instruction, last instruction, one past it
    uint64_t instructions;
};

enum { BUFFERED = 1 << 16 };
static struct record buffer[BUFFERED];
static size_t buffered;
static FILE *output;
static uint64_t instructions, branches;
static const struct block *previous;

static void flush(void) {
    if (output && fwrite(buffer, sizeof *buffer, buffered, output) != buffered) {
        perror("branches plugin: cannot write records");
        exit(1);
    }
    buffered = 0;
}

// One vCPU only: there is no lock.
static void on_block(unsigned vcpu, void *data) {
    (void)vcpu;
    const struct block *block = data;
    instructions += block->instructions;
    if (previous && previous->end != block->start) {
        ++branches;
        if (output) {
            buffer[buffered] = (struct record){previous->last, block->start, 0};
            if (++buffered == BUFFERED)
                flush();
        }
    }
    previous = block;
}

static void on_translation(qemu_plugin_id_t id, struct qemu_plugin_tb *tb) {
    (void)id;
    // Lives as long as QEMU may run the translation, which nobody tells: till the end.
    struct block *block = malloc(sizeof *block);
    if (!block) {
        fputs("branches plugin: out of memory\n", stderr);
        exit(1);
    }
    block->instructions = qemu_plugin_tb_n_insns(tb);
    const struct qemu_plugin_insn *last = qemu_plugin_tb_get_insn(tb, block->instructions - 1);
    block->start = qemu_plugin_tb_vaddr(tb);
    block->last = qemu_plugin_insn_vaddr(last);
    block->end = block->last + qemu_plugin_insn_size(last);
    qemu_plugin_register_vcpu_tb_exec_cb(tb, on_block, QEMU_PLUGIN_CB_NO_REGS, block);
}

static void on_exit_of_qemu(qemu_plugin_id_t id, void *data) {
    (void)id;
    (void)data;
    flush();
    if (output && fclose(output))
        perror("branches plugin: cannot write records");
    fprintf(stderr, "branches plugin: %llu instructions, %llu taken branches\n", (unsigned long long)instructions,
            (unsigned long long)branches);
}

EXPORT int qemu_plugin_install(qemu_plugin_id_t id, const qemu_info_t *info, int argc, char **argv) {
    if (!info->system_emulation || info->system.max_vcpus != 1) {
        fputs("branches plugin: wants a system of one vCPU\n", stderr);
        return -1;
    }
    for (int i = 0; i < argc; ++i) {
        if (strncmp(argv[i], "out=", 4) != 0) {
            fprintf(stderr, "branches plugin: unknown argument '%s'; it knows out=FILE\n", argv[i]);
            return -1;
        }
        output = fopen(argv[i] + 4, "wb");
        if (!output) {
            perror(argv[i] + 4);
            return -1;
        }
    }
    qemu_plugin_register_vcpu_tb_trans_cb(id, on_translation);
    qemu_plugin_register_atexit_cb(id, on_exit_of_qemu, NULL);
    return 0;
}
