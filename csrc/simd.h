// The loops over whole blocks of weights, in a version for each instruction set; the results are equal.
#pragma once

#include <cstddef>
#include <cstdint>

#include "delta.h"

namespace flowtrain {

inline constexpr std::size_t kBitmapWords = kBlockWords / 64;
inline constexpr int kClasses = 8;

// The weights of a word's index in the digest: two odd numbers of 32 bits.
struct Weights {
    std::uint64_t a, b;
};

inline Weights index_weights(std::uint64_t index) {
    const std::uint64_t x = (index + 1) * 0x9E3779B97F4A7C15;
    std::uint64_t r = ((x & 0xFFFFFFFF) ^ 0x85EBCA6B) * ((x >> 32) ^ 0xC2B2AE35);
    r ^= r >> 32;
    return {(r & 0xFFFFFFFF) | 1, (r >> 32) | 1};
}

// The digest change of changing a word. Words are squared, so that the sum depends on the old value.
inline Digest word_change(std::uint64_t index, std::uint64_t old_word, std::uint64_t new_word) {
    const Weights w = index_weights(index);
    const std::uint64_t change = new_word * new_word - old_word * old_word;
    return {change * w.a, change * w.b};
}

struct Kernels {
    const char* name;
    bool (*supported)();
    // Bit i of `bitmap` is set where a[i] != b[i]; bits from `num_words` to the next multiple of 64 are zero.
    void (*diff)(const std::uint16_t* a, const std::uint16_t* b, std::size_t num_words, std::uint64_t* bitmap);
    // Positions of the set bits; returns how many. Writes up to 4 entries more. Meanwhile 128 bytes per bitmap word are prefetched from
    // `ahead_a` and `ahead_b`, the next block, unless those are null.
    std::size_t (*positions)(const std::uint64_t* bitmap, std::size_t num_bitmap_words, std::uint16_t* out, const void* ahead_a,
                             const void* ahead_b);
    // One bitmap per class of words: class = clamp(top - exponent, 0, kClasses - 1).
    void (*classes)(const std::uint16_t* words, std::size_t num_words, int top, std::uint64_t (*bitmaps)[kBitmapWords]);
    // counts[i] = set bits in the first i words of the bitmap.
    void (*prefix_counts)(const std::uint64_t* bitmap, std::uint32_t* counts);
    // The rank of each position among the set bits.
    void (*ranks)(const std::uint64_t* bitmap, const std::uint32_t* counts, const std::uint16_t* positions, std::size_t n, std::uint16_t* out);
    // The set bits of the given ascending ranks.
    void (*select)(const std::uint64_t* bitmap, const std::uint32_t* counts, const std::uint16_t* ranks, std::size_t n, std::uint16_t* out);
    Digest (*digest)(const std::uint16_t* words, std::size_t num_words, std::uint64_t first);
    // The digest change when each of n words, at index first + positions[i], goes from old_words[i] to old_words[i] + diffs[i].
    Digest (*change)(std::uint64_t first, const std::uint16_t* positions, const std::uint16_t* old_words, const std::uint16_t* diffs,
                     std::size_t n);
};

const Kernels& kernels();

}  // namespace flowtrain
