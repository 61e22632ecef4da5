#include "xxh3.h"

#include "bits.h"

namespace flowtrain {
namespace {

using u8 = std::uint8_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
__extension__ typedef unsigned __int128 u128;

constexpr u64 kPrime32_1 = 0x9E3779B1, kPrime32_2 = 0x85EBCA77, kPrime32_3 = 0xC2B2AE3D;
constexpr u64 kPrime64_1 = 0x9E3779B185EBCA87, kPrime64_2 = 0xC2B2AE3D27D4EB4F, kPrime64_3 = 0x165667B19E3779F9;
constexpr u64 kPrime64_4 = 0x85EBCA77C2B2AE63, kPrime64_5 = 0x27D4EB2F165667C5;
constexpr u64 kPrimeMx1 = 0x165667919E3779F9, kPrimeMx2 = 0x9FB21C651E98DF25;

constexpr u8 kSecret[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90,
    0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d,
    0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28,
    0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3, 0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e,
    0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b,
    0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83,
    0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb, 0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16,
    0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e, 0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};
constexpr std::size_t kStripesPerRound = (sizeof(kSecret) - 64) / 8, kRound = 64 * kStripesPerRound;

u64 secret(std::size_t offset) { return load64(kSecret + offset); }

u64 fold(u64 x, u64 y) {
    const u128 product = u128(x) * y;
    return u64(product) ^ u64(product >> 64);
}

u64 avalanche(u64 x) {
    x = (x ^ (x >> 37)) * kPrimeMx1;
    return x ^ (x >> 32);
}

u64 avalanche64(u64 x) {
    x = (x ^ (x >> 33)) * kPrime64_2;
    x = (x ^ (x >> 29)) * kPrime64_3;
    return x ^ (x >> 32);
}

u64 rotate(u64 x, int bits) { return x << bits | x >> (64 - bits); }

u64 small(const u8* p, std::size_t n) {
    if (n == 0) return avalanche64(secret(56) ^ secret(64));
    if (n <= 3) {
        const u32 combined = u32(p[n - 1]) | u32(n) << 8 | u32(p[0]) << 16 | u32(p[n >> 1]) << 24;
        return avalanche64(u64(load32(kSecret) ^ load32(kSecret + 4)) ^ combined);
    }
    if (n <= 8) {
        u64 x = (secret(8) ^ secret(16)) ^ (u64(load32(p + n - 4)) | u64(load32(p)) << 32);
        x ^= rotate(x, 49) ^ rotate(x, 24);
        x *= kPrimeMx2;
        x ^= (x >> 35) + n;
        x *= kPrimeMx2;
        return x ^ (x >> 28);
    }
    const u64 low = (secret(24) ^ secret(32)) ^ load64(p), high = (secret(40) ^ secret(48)) ^ load64(p + n - 8);
    return avalanche(n + __builtin_bswap64(low) + high + fold(low, high));
}

u64 mix(const u8* p, std::size_t offset) { return fold(load64(p) ^ secret(offset), load64(p + 8) ^ secret(offset + 8)); }

u64 medium(const u8* p, std::size_t n) {
    u64 acc = n * kPrime64_1;
    if (n <= 128) {
        for (std::size_t i = (n - 1) >> 5;; --i) {
            acc += mix(p + i * 16, i * 32) + mix(p + n - i * 16 - 16, i * 32 + 16);
            if (i == 0) return avalanche(acc);
        }
    }
    for (std::size_t i = 0; i < 8; ++i) acc += mix(p + i * 16, i * 16);
    acc = avalanche(acc);
    for (std::size_t i = 8; i < n >> 4; ++i) acc += mix(p + i * 16, (i - 8) * 16 + 3);
    return avalanche(acc + mix(p + n - 16, 119));
}

void accumulate(u64* acc, const u8* stripe, std::size_t offset) {
    for (int i = 0; i < 8; ++i) {
        const u64 data = load64(stripe + 8 * i), value = data ^ secret(offset + 8 * i);
        acc[i ^ 1] += data;
        acc[i] += u64(u32(value)) * (value >> 32);
    }
}

u64 large(const u8* p, const std::size_t size) {
    std::size_t n = size;
    u64 acc[8] = {kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3, kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1};
    const u8* const last = p + n - 64;
    for (; n > kRound; p += kRound, n -= kRound) {
        for (std::size_t s = 0; s < kStripesPerRound; ++s) accumulate(acc, p + 64 * s, 8 * s);
        for (int i = 0; i < 8; ++i) acc[i] = (acc[i] ^ (acc[i] >> 47) ^ secret(sizeof(kSecret) - 64 + 8 * i)) * kPrime32_1;
    }
    for (std::size_t i = 0; i < (n - 1) / 64; ++i) accumulate(acc, p + 64 * i, 8 * i);
    accumulate(acc, last, sizeof(kSecret) - 71);
    u64 result = size * kPrime64_1;
    for (int i = 0; i < 4; ++i) result += fold(acc[2 * i] ^ secret(11 + 16 * i), acc[2 * i + 1] ^ secret(19 + 16 * i));
    return avalanche(result);
}

}  // namespace

std::uint64_t xxh3(const void* data, std::size_t size) {
    const u8* p = static_cast<const u8*>(data);
    if (size <= 16) return small(p, size);
    if (size <= 240) return medium(p, size);
    return large(p, size);
}

}  // namespace flowtrain
