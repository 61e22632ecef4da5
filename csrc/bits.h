// Little-endian loads, and Rice codes in two streams.
//
// A Rice code of v with parameter k is v >> k in unary and the low k bits as they are. Kept apart, the low bits of any value can be read
// at once and the unary part is a walk over set bits: that is what makes decoding fast.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace flowtrain {

// Readers and writers touch up to this many bytes after the end of their streams, so every buffer is that much longer.
inline constexpr std::size_t kSlack = 64;

inline std::uint32_t load32(const void* p) {
    std::uint32_t x;
    std::memcpy(&x, p, sizeof x);
    return x;
}

inline std::uint64_t load64(const void* p) {
    std::uint64_t x;
    std::memcpy(&x, p, sizeof x);
    return x;
}

inline std::size_t bytes_of(std::uint64_t bits) { return std::size_t((bits + 7) / 8); }

class BitWriter {
  public:
    explicit BitWriter(std::uint8_t* out) : out_(out) {}

    void put(std::uint64_t value, unsigned bits) {  // bits <= 56
        pending_ |= value << fill_;
        fill_ += bits;
        std::memcpy(out_, &pending_, 8);
        out_ += fill_ >> 3;
        pending_ >>= fill_ & ~7u;
        fill_ &= 7;
    }

    void put_unary(std::uint64_t zeros) {
        for (; zeros >= 56; zeros -= 56) put(0, 56);
        put(std::uint64_t(1) << zeros, unsigned(zeros) + 1);
    }

    // The low k bits of each value. As many as fit go out at once: a put waits for the one before it, gathering does not.
    void put_low(const std::uint16_t* values, std::size_t n, unsigned k) {
        if (k == 0) return;
        const unsigned at_once = 56 / k;
        const std::uint64_t mask = (std::uint64_t(1) << k) - 1;
        std::size_t i = 0;
        for (; i + at_once <= n; i += at_once) {
            std::uint64_t bits = 0;
            for (unsigned j = 0; j < at_once; ++j) bits |= (values[i + j] & mask) << (j * k);
            put(bits, at_once * k);
        }
        for (; i < n; ++i) put(values[i] & mask, k);
    }

    // The upper bits of each value in unary, four at once where they are short.
    void put_high(const std::uint16_t* values, std::size_t n, unsigned k) {
        std::size_t i = 0;
        for (; i + 4 <= n; i += 4) {
            const unsigned a = values[i] >> k, b = a + 1 + (values[i + 1] >> k), c = b + 1 + (values[i + 2] >> k),
                           d = c + 1 + (values[i + 3] >> k);
            if (d < 56) {
                put(std::uint64_t(1) << a | std::uint64_t(1) << b | std::uint64_t(1) << c | std::uint64_t(1) << d, d + 1);
            } else {
                for (std::size_t j = i; j < i + 4; ++j) put_unary(values[j] >> k);
            }
        }
        for (; i < n; ++i) put_unary(values[i] >> k);
    }

    std::uint8_t* finish() const { return out_ + (fill_ > 0); }  // to the next whole byte

  private:
    std::uint8_t* out_;
    std::uint64_t pending_ = 0;
    unsigned fill_ = 0;
};

class BitReader {
  public:
    explicit BitReader(const std::uint8_t* in) : in_(in) {}

    std::uint32_t get(unsigned bits) {  // bits <= 32
        const std::uint64_t word = load64(in_ + (at_ >> 3)) >> (at_ & 7);
        at_ += bits;
        return std::uint32_t(word & ((std::uint64_t(1) << bits) - 1));
    }

    const std::uint8_t* finish() const { return in_ + bytes_of(at_); }

  private:
    const std::uint8_t* in_;
    std::size_t at_ = 0;
};

// Set bits of a stream in order, each as the number of zeros before it. `more` must be asked before `next`.
class UnaryReader {
  public:
    UnaryReader(const std::uint8_t* in, const std::uint8_t* end) : in_(in), end_(end), bits_(load64(in)) {}

    bool more() {
        while (bits_ == 0) {
            base_ += 64;
            if (in_ + base_ / 8 >= end_) return false;
            bits_ = load64(in_ + base_ / 8);
        }
        return true;
    }

    std::uint64_t next() {
        const std::uint64_t at = base_ + std::uint64_t(__builtin_ctzll(bits_));
        bits_ &= bits_ - 1;
        const std::uint64_t zeros = at - next_;
        next_ = at + 1;
        return zeros;
    }

    // The byte after the last one used; beyond `end` when the stream ran over it.
    const std::uint8_t* finish() const { return in_ + bytes_of(next_); }

  private:
    const std::uint8_t *in_, *end_;
    std::uint64_t bits_, base_ = 0, next_ = 0;
};

struct RiceCost {
    unsigned k = 0;
    std::uint64_t low_bits = 0, unary_bits = 0;
};

// The cheaper of the two parameters around the mean of `values`.
inline RiceCost rice_cost(const std::uint16_t* values, std::size_t n) {
    if (n == 0) return {};
    std::uint64_t sum = 0;
    for (std::size_t i = 0; i < n; ++i) sum += values[i];
    unsigned k = 0;
    while ((std::uint64_t(n) << (k + 1)) <= sum && k < 15) ++k;
    RiceCost best;
    for (unsigned tried = k > 0 ? k - 1 : 0; tried <= k; ++tried) {
        std::uint32_t zeros = 0;  // at most 65,536 values of 16 bits
        for (std::size_t i = 0; i < n; ++i) zeros += std::uint32_t(values[i] >> tried);
        const RiceCost cost{tried, n * tried, n + zeros};
        if (best.unary_bits == 0 || cost.low_bits + cost.unary_bits < best.low_bits + best.unary_bits) best = cost;
    }
    return best;
}

}  // namespace flowtrain
