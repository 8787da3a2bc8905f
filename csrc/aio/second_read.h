// Reads a block again whose bytes do not match their checksum, which tells a fault on the way from bytes that the drive
// stored wrongly.
#pragma once

#include <cstdint>
#include <string>

#include "file.h"

namespace infinity::aio {

struct SecondRead {
    bool right;             // the block is in memory now, and matches its checksum
    std::string diagnosis;  // of a block that does not: what the second read says about the cause
};

// Reads the bytes [at, at + bytes) of a file with checksums from the drive, past the page cache, and copies them to
// `memory` unless they equal the wrong ones there. at: the start of a checksum block. bytes: of its data, at most one
// block. Waits for the drive: it runs only after a mismatch, in the I/O thread. The request is still under way then, so
// that nothing writes the block meanwhile.
SecondRead read_again(const File& file, uint64_t at, uint64_t bytes, char* memory);

}  // namespace infinity::aio
