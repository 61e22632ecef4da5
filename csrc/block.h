// One block of up to 65,536 words: which words changed and by how much, in the cheapest of five codecs.
#pragma once

#include <cstddef>
#include <cstdint>

#include "bits.h"
#include "delta.h"
#include "simd.h"

namespace flowtrain {

enum Codec : unsigned { kEmpty, kPairs, kRice, kClassRice, kBitmap, kDense, kNumCodecs };

// Changes of a block: ascending positions and their wrap differences, never zero.
struct Changes {
    std::size_t n = 0;
    std::uint16_t positions[kBlockWords + kSlack];
    std::uint16_t diffs[kBlockWords + kSlack];
};

// One word for each change.
using Gathered = std::uint16_t[kBlockWords];

// Scratch memory for coding a block; too large for a stack.
struct Workspace {
    Changes changes;
    Gathered old_of_changes;
    std::uint16_t old_words[kBlockWords], new_words[kBlockWords];
    std::uint64_t bitmap[kBitmapWords];
    std::uint64_t classes[kClasses][kBitmapWords];
    std::uint32_t counts[kBitmapWords + 1];
    // Class after class, where there are classes: ranks or positions, differences, and the exceptions (of more than one unit).
    std::uint16_t ranks[kBlockWords + kSlack], gaps[kBlockWords], diffs[kBlockWords + kSlack];
    std::uint16_t exception_gaps[kBlockWords], excess[kBlockWords];
    std::uint8_t payload[2 * kBlockWords + kSlack];
};

struct Coded {
    Codec codec;
    std::size_t size;
};

// The number of bytes that `encode_block` may write to `out` for a block of `num_words`.
std::size_t block_room(std::size_t num_words);

// Fill ws.changes with the words that differ, and ws.old_of_changes; `ahead_*` as in Kernels::positions.
void find_changes(const std::uint16_t* old_words, const std::uint16_t* new_words, std::size_t num_words, Workspace& ws,
                  const void* ahead_old = nullptr, const void* ahead_new = nullptr);

// Write ws.changes. `old_words` is null at level 1.
Coded encode_block(const std::uint16_t* old_words, std::size_t num_words, Workspace& ws, std::uint8_t* out);

// Read a payload. Throws Error(kCorrupt) when it is not what `encode_block` writes for some block of `num_words`; `old_words` may be null
// unless the codec is kClassRice, where other words than the encoder's may throw Error(kWrongBase). Positions are ascending but for
// kClassRice, where they ascend within each class.
void decode_block(Codec codec, View payload, const std::uint16_t* old_words, std::size_t num_words, Workspace& ws, Changes& out);

}  // namespace flowtrain
