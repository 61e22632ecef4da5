#include "simd.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <numeric>

#include "bits.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace flowtrain {
namespace {

using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;

#define INLINE static inline __attribute__((always_inline))

// Bodies that the compiler vectorises by itself for the instruction set of the function that they are inlined into.

INLINE std::size_t positions_body(const u64* bitmap, std::size_t num_bitmap_words, u16* out, const char* ahead_a, const char* ahead_b) {
    std::size_t n = 0;
    for (std::size_t w = 0; w < num_bitmap_words; ++w) {
        if (ahead_a) {
            for (int line = 0; line < 128; line += 64) {
                __builtin_prefetch(ahead_a + 128 * w + line, 0, 2);
                __builtin_prefetch(ahead_b + 128 * w + line, 0, 2);
            }
        }
        u64 bits = bitmap[w];
        const u16 base = u16(64 * w);
        const int count = __builtin_popcountll(bits);
        // Always write four: at usual densities the branch is then predicted.
        for (u16* next = out + n;; next += 4) {
            for (int i = 0; i < 4; ++i) {
                next[i] = u16(base + __builtin_ctzll(bits | u64(1) << 63));
                bits &= bits - 1;
            }
            if (__builtin_expect(next + 4 >= out + n + count, 1)) break;
        }
        n += std::size_t(count);
    }
    return n;
}

INLINE void prefix_counts_body(const u64* bitmap, u32* counts) {
    u32 sum = 0;
    for (std::size_t w = 0; w < kBitmapWords; ++w) {
        counts[w] = sum;
        sum += u32(__builtin_popcountll(bitmap[w]));
    }
    counts[kBitmapWords] = sum;
}

INLINE void ranks_body(const u64* bitmap, const u32* counts, const u16* positions, std::size_t n, u16* out) {
    for (std::size_t i = 0; i < n; ++i) {
        const u64 below = (u64(1) << (positions[i] & 63)) - 1;
        out[i] = u16(counts[positions[i] >> 6] + u32(__builtin_popcountll(bitmap[positions[i] >> 6] & below)));
    }
}

template <class SelectInWord>
INLINE void select_body(const u64* bitmap, const u32* counts, const u16* ranks, std::size_t n, u16* out, SelectInWord select_in_word) {
    std::size_t w = 0;
    for (std::size_t i = 0; i < n; ++i) {
        while (counts[w + 1] <= ranks[i]) ++w;
        out[i] = u16(64 * w + select_in_word(bitmap[w], ranks[i] - counts[w]));
    }
}

INLINE unsigned class_of(u16 word, int top) {
    const int exponent = (word >> 7) & 0xFF;
    return unsigned(std::clamp(top - exponent, 0, kClasses - 1));
}

INLINE Digest digest_of(u16 word, u64 index) { return word_change(index, 0, word); }

// ---- any machine

bool always() { return true; }

void diff_scalar(const u16* a, const u16* b, std::size_t num_words, u64* bitmap) {
    std::size_t i = 0;
    for (; i + 64 <= num_words; i += 64) {
        u64 bits = 0;
        for (std::size_t j = 0; j < 64; j += 4) {
            if (load64(a + i + j) == load64(b + i + j)) continue;
            for (std::size_t l = j; l < j + 4; ++l) bits |= u64(a[i + l] != b[i + l]) << l;
        }
        bitmap[i / 64] = bits;
    }
    if (i < num_words) {
        u64 bits = 0;
        for (std::size_t j = 0; i + j < num_words; ++j) bits |= u64(a[i + j] != b[i + j]) << j;
        bitmap[i / 64] = bits;
    }
}

std::size_t positions_scalar(const u64* bitmap, std::size_t words, u16* out, const void* ahead_a, const void* ahead_b) {
    return positions_body(bitmap, words, out, static_cast<const char*>(ahead_a), static_cast<const char*>(ahead_b));
}

void classes_scalar(const u16* words, std::size_t num_words, int top, u64 (*bitmaps)[kBitmapWords]) {
    std::memset(bitmaps, 0, sizeof(u64) * kClasses * kBitmapWords);
    for (std::size_t i = 0; i < num_words; ++i) bitmaps[class_of(words[i], top)][i / 64] |= u64(1) << (i % 64);
}

void prefix_counts_scalar(const u64* bitmap, u32* counts) { prefix_counts_body(bitmap, counts); }

void ranks_scalar(const u64* bitmap, const u32* counts, const u16* positions, std::size_t n, u16* out) {
    ranks_body(bitmap, counts, positions, n, out);
}

void select_scalar(const u64* bitmap, const u32* counts, const u16* ranks, std::size_t n, u16* out) {
    select_body(bitmap, counts, ranks, n, out, [](u64 bits, u32 rank) {
        for (; rank > 0; --rank) bits &= bits - 1;
        return unsigned(__builtin_ctzll(bits));
    });
}

Digest digest_scalar(const u16* words, std::size_t num_words, u64 first) {
    Digest sum;
    for (std::size_t i = 0; i < num_words; ++i) sum += digest_of(words[i], first + i);
    return sum;
}

Digest change_scalar(u64 first, const u16* positions, const u16* old_words, const u16* diffs, std::size_t n) {
    Digest sum;
    for (std::size_t i = 0; i < n; ++i) sum += word_change(first + positions[i], old_words[i], u16(old_words[i] + diffs[i]));
    return sum;
}

constexpr Kernels kScalar{"scalar",     always,        diff_scalar,   positions_scalar, classes_scalar, prefix_counts_scalar,
                          ranks_scalar, select_scalar, digest_scalar, change_scalar};

#if defined(__x86_64__)

#define AVX2 __attribute__((target("avx2,bmi,bmi2,popcnt,lzcnt")))
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,bmi,bmi2,popcnt,lzcnt")))

// ---- AVX2

bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
           __builtin_cpu_supports("popcnt");
}

AVX2 void diff_avx2(const u16* a, const u16* b, std::size_t num_words, u64* bitmap) {
    std::size_t i = 0;
    for (; i + 64 <= num_words; i += 64) {
        u32 equal[2];
        for (int half = 0; half < 2; ++half) {
            const auto* x = reinterpret_cast<const __m256i*>(a + i + 32 * half);
            const auto* y = reinterpret_cast<const __m256i*>(b + i + 32 * half);
            const __m256i low = _mm256_cmpeq_epi16(_mm256_loadu_si256(x), _mm256_loadu_si256(y));
            const __m256i high = _mm256_cmpeq_epi16(_mm256_loadu_si256(x + 1), _mm256_loadu_si256(y + 1));
            const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(low, high), 0xD8);
            equal[half] = u32(_mm256_movemask_epi8(bytes));
        }
        bitmap[i / 64] = ~(u64(equal[1]) << 32 | equal[0]);
    }
    if (i < num_words) diff_scalar(a + i, b + i, num_words - i, bitmap + i / 64);
}

AVX2 std::size_t positions_avx2(const u64* bitmap, std::size_t words, u16* out, const void* ahead_a, const void* ahead_b) {
    return positions_body(bitmap, words, out, static_cast<const char*>(ahead_a), static_cast<const char*>(ahead_b));
}

AVX2 void classes_avx2(const u16* words, std::size_t num_words, int top, u64 (*bitmaps)[kBitmapWords]) {
    const __m256i exponents = _mm256_set1_epi16(0xFF), tops = _mm256_set1_epi16(short(top)), last = _mm256_set1_epi16(kClasses - 1);
    const auto classes_of = [=](const u16* p) AVX2 {
        const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
        const __m256i exponent = _mm256_and_si256(_mm256_srli_epi16(x, 7), exponents);
        return _mm256_min_epu16(_mm256_subs_epu16(tops, exponent), last);
    };
    alignas(32) u16 tail[64] = {};
    for (std::size_t i = 0; i < num_words; i += 64) {
        const std::size_t left = num_words - i;
        const u16* p = words + i;
        if (left < 64) p = static_cast<u16*>(std::memcpy(tail, p, 2 * left));
        const u64 inside = left < 64 ? (u64(1) << left) - 1 : ~u64(0);
        const __m256i low = _mm256_permute4x64_epi64(_mm256_packus_epi16(classes_of(p), classes_of(p + 16)), 0xD8);
        const __m256i high = _mm256_permute4x64_epi64(_mm256_packus_epi16(classes_of(p + 32), classes_of(p + 48)), 0xD8);
        for (int c = 0; c < kClasses; ++c) {
            const __m256i id = _mm256_set1_epi8(char(c));
            const u32 bits_low = u32(_mm256_movemask_epi8(_mm256_cmpeq_epi8(low, id)));
            const u32 bits_high = u32(_mm256_movemask_epi8(_mm256_cmpeq_epi8(high, id)));
            bitmaps[c][i / 64] = (u64(bits_high) << 32 | bits_low) & inside;
        }
    }
    for (int c = 0; c < kClasses; ++c) std::fill(bitmaps[c] + (num_words + 63) / 64, bitmaps[c] + kBitmapWords, 0);
}

AVX2 void prefix_counts_avx2(const u64* bitmap, u32* counts) { prefix_counts_body(bitmap, counts); }

AVX2 void ranks_avx2(const u64* bitmap, const u32* counts, const u16* positions, std::size_t n, u16* out) {
    ranks_body(bitmap, counts, positions, n, out);
}

AVX2 void select_avx2(const u64* bitmap, const u32* counts, const u16* ranks, std::size_t n, u16* out) {
    select_body(bitmap, counts, ranks, n, out,
                [](u64 bits, u32 rank) AVX2 { return unsigned(__builtin_ctzll(_pdep_u64(u64(1) << rank, bits))); });
}

constexpr u64 kStep = 0x9E3779B97F4A7C15, kFlipLow = 0x85EBCA6B, kFlipHigh = 0xC2B2AE35;  // of index_weights

// Adds amount * weight of the index to both sums, for four 64-bit lanes of (index + 1) * kStep. _mm256_mul_epu32 multiplies the low halves
// of its lanes, so nothing need be masked; an amount of more than 32 bits comes as two.
struct Sums256 {
    __m256i a, b;

    AVX2 void add(__m256i x, __m256i amount) {
        const __m256i one = _mm256_set1_epi64x(1);
        __m256i r = _mm256_mul_epu32(_mm256_xor_si256(x, _mm256_set1_epi64x((long long)kFlipLow)),
                                     _mm256_xor_si256(_mm256_srli_epi64(x, 32), _mm256_set1_epi64x((long long)kFlipHigh)));
        r = _mm256_xor_si256(r, _mm256_srli_epi64(r, 32));
        a = _mm256_add_epi64(a, _mm256_mul_epu32(amount, _mm256_or_si256(r, one)));
        b = _mm256_add_epi64(b, _mm256_mul_epu32(amount, _mm256_or_si256(_mm256_srli_epi64(r, 32), one)));
    }

    AVX2 Digest total() const {
        alignas(32) u64 of_a[4], of_b[4];
        _mm256_store_si256(reinterpret_cast<__m256i*>(of_a), a);
        _mm256_store_si256(reinterpret_cast<__m256i*>(of_b), b);
        return {std::accumulate(of_a, of_a + 4, u64(0)), std::accumulate(of_b, of_b + 4, u64(0))};
    }
};

AVX2 inline __m256i four_words(const u16* p) { return _mm256_cvtepu16_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))); }

AVX2 Digest digest_avx2(const u16* words, std::size_t num_words, u64 first) {
    const u64 x0 = (first + 1) * kStep;
    __m256i x = _mm256_set_epi64x((long long)(x0 + 3 * kStep), (long long)(x0 + 2 * kStep), (long long)(x0 + kStep), (long long)x0);
    const __m256i step = _mm256_set1_epi64x((long long)(4 * kStep));
    Sums256 sums{_mm256_setzero_si256(), _mm256_setzero_si256()};
    std::size_t i = 0;
    for (; i + 4 <= num_words; i += 4) {
        const __m256i w = four_words(words + i);
        sums.add(x, _mm256_mul_epu32(w, w));
        x = _mm256_add_epi64(x, step);
    }
    return sums.total() + digest_scalar(words + i, num_words - i, first + i);
}

AVX2 Digest change_avx2(u64 first, const u16* positions, const u16* old_words, const u16* diffs, std::size_t n) {
    const __m256i x0 = _mm256_set1_epi64x((long long)((first + 1) * kStep)), word = _mm256_set1_epi64x(0xFFFF);
    const __m256i step_low = _mm256_set1_epi64x((long long)(kStep & 0xFFFFFFFF)), step_high = _mm256_set1_epi64x((long long)(kStep >> 32));
    Sums256 before{_mm256_setzero_si256(), _mm256_setzero_si256()}, after = before;
    std::size_t i = 0;
    for (; i + 4 <= n; i += 4) {
        const __m256i at = four_words(positions + i), from = four_words(old_words + i);
        const __m256i to = _mm256_and_si256(_mm256_add_epi64(from, four_words(diffs + i)), word);
        const __m256i high = _mm256_slli_epi64(_mm256_mul_epu32(at, step_high), 32);
        const __m256i x = _mm256_add_epi64(x0, _mm256_add_epi64(_mm256_mul_epu32(at, step_low), high));
        before.add(x, _mm256_mul_epu32(from, from));
        after.add(x, _mm256_mul_epu32(to, to));
    }
    return after.total() - before.total() + change_scalar(first, positions + i, old_words + i, diffs + i, n - i);
}

constexpr Kernels kAvx2{"avx2",     has_avx2,    diff_avx2,  positions_avx2, classes_avx2, prefix_counts_avx2,
                        ranks_avx2, select_avx2, digest_avx2, change_avx2};

// ---- AVX-512

bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl");
}

AVX512 void diff_avx512(const u16* a, const u16* b, std::size_t num_words, u64* bitmap) {
    std::size_t i = 0;
    for (; i + 64 <= num_words; i += 64) {
        const u64 low = _mm512_cmpneq_epi16_mask(_mm512_loadu_si512(a + i), _mm512_loadu_si512(b + i));
        const u64 high = _mm512_cmpneq_epi16_mask(_mm512_loadu_si512(a + i + 32), _mm512_loadu_si512(b + i + 32));
        bitmap[i / 64] = high << 32 | low;
    }
    if (i < num_words) diff_scalar(a + i, b + i, num_words - i, bitmap + i / 64);
}

struct Sums512 {  // as Sums256
    __m512i a, b;

    AVX512 void add(__m512i x, __m512i amount) {
        const __m512i one = _mm512_set1_epi64(1);
        __m512i r = _mm512_mul_epu32(_mm512_xor_si512(x, _mm512_set1_epi64((long long)kFlipLow)),
                                     _mm512_xor_si512(_mm512_srli_epi64(x, 32), _mm512_set1_epi64((long long)kFlipHigh)));
        r = _mm512_xor_si512(r, _mm512_srli_epi64(r, 32));
        a = _mm512_add_epi64(a, _mm512_mul_epu32(amount, _mm512_or_si512(r, one)));
        b = _mm512_add_epi64(b, _mm512_mul_epu32(amount, _mm512_or_si512(_mm512_srli_epi64(r, 32), one)));
    }

    AVX512 Digest total() const {
        alignas(64) u64 of_a[8], of_b[8];
        _mm512_store_si512(of_a, a);
        _mm512_store_si512(of_b, b);
        return {std::accumulate(of_a, of_a + 8, u64(0)), std::accumulate(of_b, of_b + 8, u64(0))};
    }
};

AVX512 inline __m512i eight_words(const u16* p) { return _mm512_cvtepu16_epi64(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }

AVX512 Digest digest_avx512(const u16* words, std::size_t num_words, u64 first) {
    alignas(64) u64 starts[8];
    for (u64 j = 0; j < 8; ++j) starts[j] = (first + 1 + j) * kStep;
    __m512i x = _mm512_load_si512(starts);
    const __m512i step = _mm512_set1_epi64((long long)(8 * kStep));
    Sums512 sums{_mm512_setzero_si512(), _mm512_setzero_si512()};
    std::size_t i = 0;
    for (; i + 8 <= num_words; i += 8) {
        const __m512i w = eight_words(words + i);
        sums.add(x, _mm512_mul_epu32(w, w));
        x = _mm512_add_epi64(x, step);
    }
    return sums.total() + digest_scalar(words + i, num_words - i, first + i);
}

AVX512 Digest change_avx512(u64 first, const u16* positions, const u16* old_words, const u16* diffs, std::size_t n) {
    const __m512i x0 = _mm512_set1_epi64((long long)((first + 1) * kStep)), step = _mm512_set1_epi64((long long)kStep);
    const __m512i word = _mm512_set1_epi64(0xFFFF);
    Sums512 before{_mm512_setzero_si512(), _mm512_setzero_si512()}, after = before;
    std::size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const __m512i from = eight_words(old_words + i);
        const __m512i to = _mm512_and_si512(_mm512_add_epi64(from, eight_words(diffs + i)), word);
        const __m512i x = _mm512_add_epi64(x0, _mm512_mullo_epi64(eight_words(positions + i), step));
        before.add(x, _mm512_mul_epu32(from, from));
        after.add(x, _mm512_mul_epu32(to, to));
    }
    return after.total() - before.total() + change_scalar(first, positions + i, old_words + i, diffs + i, n - i);
}

constexpr Kernels kAvx512{"avx512",   has_avx512,  diff_avx512,   positions_avx2, classes_avx2, prefix_counts_avx2,
                          ranks_avx2, select_avx2, digest_avx512, change_avx512};

constexpr const Kernels* kAll[] = {&kAvx512, &kAvx2, &kScalar};
#else
constexpr const Kernels* kAll[] = {&kScalar};
#endif

const Kernels* best() {
    return *std::find_if(std::begin(kAll), std::end(kAll), [](const Kernels* k) { return k->supported(); });
}

std::atomic<const Kernels*> chosen{best()};

}  // namespace

const Kernels& kernels() { return *chosen.load(std::memory_order_relaxed); }

bool use_isa(const std::string& name) {
    if (name == "best") return chosen = best(), true;
    for (const Kernels* k : kAll) {
        if (name == k->name && k->supported()) return chosen = k, true;
    }
    return false;
}

std::string isa() { return kernels().name; }

}  // namespace flowtrain
