// Writes the sample trace: sample_trace FILE. For cli_test.py.
#include <cstdio>

#include "tests/decode/sample_trace.h"

int main(int argc, char** argv) {
    if (argc != 2)
        return 2;
    int status = 0;
    vtrace_test::write_sample(argv[1], [&](const std::string& message) {
        std::fprintf(stderr, "sample_trace: %s\n", message.c_str());
        status = 1;
    });
    return status;
}
