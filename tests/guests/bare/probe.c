// Does this KVM really run a guest? Ring 3 and back is what one without hardware under it fails at.
#include "runtime.h"

extern u8 user_interrupt[];
__asm__("user_interrupt: int $0x80\n");

int main(void) {
    check("ring 3 and back", run_user(user_interrupt, 0, 0), 0x80);
    return failures();
}
