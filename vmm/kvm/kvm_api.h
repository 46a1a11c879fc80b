// KVM's API header as its ABI is. To be included instead of <linux/kvm.h>.
//
// The <linux/stddef.h> of some kernels (among them Debian 12's) declares an array without a length together with an
// empty struct, which in C++ has a size: kvm_cpuid2, kvm_msrs, kvm_xsave and others become longer than the kernel's,
// and with them the numbers of KVM_SET_CPUID2, KVM_GET_MSRS, KVM_GET_XSAVE ..., which KVM then refuses with EINVAL.
#pragma once

#include <linux/stddef.h>

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpedantic"
#undef __DECLARE_FLEX_ARRAY
#define __DECLARE_FLEX_ARRAY(type, name) type name[0]
#include <linux/kvm.h>
#pragma GCC diagnostic pop

static_assert(sizeof(kvm_cpuid2) == 8 && sizeof(kvm_msrs) == 8 && sizeof(kvm_msr_list) == 4 &&
                  sizeof(kvm_signal_mask) == 4 && sizeof(kvm_xsave) == 4096,
              "<linux/kvm.h> was included before this header, with another layout than KVM's");
