// XXH3, 64 bits, seed 0, default secret; after the specification at github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md.
#pragma once

#include <cstddef>
#include <cstdint>

namespace flowtrain {

std::uint64_t xxh3(const void* data, std::size_t size);

}  // namespace flowtrain
