#include "block.h"

#include <algorithm>

namespace flowtrain {
namespace {

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;

constexpr unsigned kWidthBits = 5, kTopBits = 8, kParameterBits = 4;

// One class of words of a block; a block without classes is one class.
struct Class {
    std::size_t n = 0, num_exceptions = 0;
    RiceCost gaps, exception_gaps, excess;
};

// A block's changes as they are written: class after class, gaps between positions or ranks, a sign each; and for exceptions, whose
// difference is not +1 or -1, the gap to the previous exception and the excess over one unit.
struct Layout {
    int num_classes = 1;
    int top = 0;  // see Kernels::classes
    bool has_gaps = true;
    Class classes[kClasses];

    std::size_t n() const { return total(&Class::n); }
    std::size_t num_exceptions() const { return total(&Class::num_exceptions); }
    std::size_t total(std::size_t Class::* field) const {
        std::size_t sum = 0;
        for (int c = 0; c < num_classes; ++c) sum += classes[c].*field;
        return sum;
    }
    unsigned width() const {
        std::size_t most = 1;
        for (int c = 0; c < num_classes; ++c) most = std::max(most, classes[c].n);
        return 64 - unsigned(__builtin_clzll(most));
    }
    std::size_t size() const;
};

unsigned header_bits(const Layout& layout) {
    const unsigned width = layout.width();
    unsigned bits = kWidthBits + (layout.num_classes > 1 ? kTopBits : 0);
    for (int c = 0; c < layout.num_classes; ++c) {
        const Class& one = layout.classes[c];
        bits += width;
        if (one.n) bits += width + (layout.has_gaps ? kParameterBits : 0);
        if (one.num_exceptions) bits += 2 * kParameterBits;
    }
    return bits;
}

std::size_t streams_size(const Layout& layout, RiceCost Class::* stream) {
    u64 low = 0, unary = 0;
    for (int c = 0; c < layout.num_classes; ++c) {
        low += (layout.classes[c].*stream).low_bits;
        unary += (layout.classes[c].*stream).unary_bits;
    }
    return bytes_of(low) + bytes_of(unary);
}

std::size_t Layout::size() const {
    return bytes_of(header_bits(*this)) + (has_gaps ? streams_size(*this, &Class::gaps) : 0) + bytes_of(n()) +
           streams_size(*this, &Class::exception_gaps) + streams_size(*this, &Class::excess);
}

u16 magnitude(u16 diff) { return diff & 0x8000 ? u16(-diff) : diff; }

void plan_gaps(const u16* positions, Class& one, u16* gaps) {
    u32 next = 0;
    for (std::size_t i = 0; i < one.n; ++i) {
        gaps[i] = u16(positions[i] - next);
        next = positions[i] + 1u;
    }
    one.gaps = rice_cost(gaps, one.n);
}

void plan_values(const u16* diffs, Class& one, u16* exception_gaps, u16* excess) {
    std::size_t found = 0;
    u32 next = 0;
    for (std::size_t i = 0; i < one.n; ++i) {
        const u16 size = magnitude(diffs[i]);
        exception_gaps[found] = u16(i - next);
        excess[found] = u16(size - 2);
        const bool is_exception = size != 1;
        next = is_exception ? u32(i + 1) : next;
        found += is_exception;
    }
    one.num_exceptions = found;
    one.exception_gaps = rice_cost(exception_gaps, found);
    one.excess = rice_cost(excess, found);
}

u8* write_header(const Layout& layout, u8* out) {
    BitWriter bits(out);
    const unsigned width = layout.width();
    if (layout.num_classes > 1) bits.put(u64(layout.top), kTopBits);
    bits.put(width, kWidthBits);
    for (int c = 0; c < layout.num_classes; ++c) {
        const Class& one = layout.classes[c];
        bits.put(one.n, width);
        if (one.n == 0) continue;
        if (layout.has_gaps) bits.put(one.gaps.k, kParameterBits);
        bits.put(one.num_exceptions, width);
        if (one.num_exceptions == 0) continue;
        bits.put(one.exception_gaps.k, kParameterBits);
        bits.put(one.excess.k, kParameterBits);
    }
    return bits.finish();
}

u8* write_rice(const Layout& layout, RiceCost Class::* stream, std::size_t Class::* number, const u16* values, u8* out) {
    BitWriter low(out);
    const u16* v = values;
    for (int c = 0; c < layout.num_classes; ++c) {
        const Class& one = layout.classes[c];
        low.put_low(v, one.*number, (one.*stream).k);
        v += one.*number;
    }
    BitWriter unary(low.finish());
    for (int c = 0; c < layout.num_classes; ++c) {
        const Class& one = layout.classes[c];
        unary.put_high(values, one.*number, (one.*stream).k);
        values += one.*number;
    }
    return unary.finish();
}

u8* write_signs(const u16* diffs, std::size_t n, u8* out) {
    for (std::size_t i = 0; i < n; i += 64) {
        u64 bits = 0;
        for (std::size_t j = i; j < std::min(n, i + 64); ++j) bits |= u64(diffs[j] >> 15) << (j - i);
        std::memcpy(out + i / 8, &bits, 8);
    }
    return out + bytes_of(n);
}

u8* write_values(const Layout& layout, const u16* diffs, const Workspace& ws, u8* out) {
    out = write_signs(diffs, layout.n(), out);
    out = write_rice(layout, &Class::exception_gaps, &Class::num_exceptions, ws.exception_gaps, out);
    return write_rice(layout, &Class::excess, &Class::num_exceptions, ws.excess, out);
}

// The exponent that a twentieth of the block reaches, estimated from every 16th word; larger words share the first class.
int choose_top(const u16* words, std::size_t num_words) {
    u32 histogram[256] = {};
    u32 total = 0;
    for (std::size_t i = 0; i < num_words; i += 16, ++total) ++histogram[(words[i] >> 7) & 0xFF];
    u32 above = 0;
    int exponent = 255;
    for (; exponent > 0; --exponent) {
        above += histogram[exponent];
        if (above * 20 >= total) break;
    }
    return exponent;
}

// Sort the changes by class into ws.ranks (their ranks within the class) and ws.diffs.
Layout plan_classes(const u16* old_words, std::size_t num_words, Workspace& ws) {
    Layout layout;
    layout.num_classes = kClasses;
    layout.top = choose_top(old_words, num_words);
    kernels().classes(old_words, num_words, layout.top, ws.classes);
    const Changes& changes = ws.changes;
    std::size_t at = 0;
    for (int c = 0; c < kClasses; ++c) {
        Class& one = layout.classes[c];
        const std::size_t start = at;
        for (std::size_t i = 0; i < changes.n; ++i) {  // may write one entry too many: both arrays have slack
            const u16 position = changes.positions[i];
            ws.ranks[at] = position;
            ws.diffs[at] = changes.diffs[i];
            at += (ws.classes[c][position >> 6] >> (position & 63)) & 1;
        }
        one.n = at - start;
        if (one.n == 0) continue;
        kernels().prefix_counts(ws.classes[c], ws.counts);
        kernels().ranks(ws.classes[c], ws.counts, ws.ranks + start, one.n, ws.ranks + start);
    }
    return layout;
}

u8* write_pairs(const Changes& changes, u8* out) {
    const u16 last = u16(changes.n - 1);
    std::memcpy(out, &last, 2);
    std::memcpy(out + 2, changes.positions, 2 * changes.n);
    std::memcpy(out + 2 + 2 * changes.n, changes.diffs, 2 * changes.n);
    return out + 2 + 4 * changes.n;
}

u8* write_dense(const Changes& changes, std::size_t num_words, u8* out) {
    std::memset(out, 0, 2 * num_words);
    for (std::size_t i = 0; i < changes.n; ++i) std::memcpy(out + 2 * changes.positions[i], &changes.diffs[i], 2);
    return out + 2 * num_words;
}

u8* write_bitmap(const Changes& changes, std::size_t num_words, u8* out) {
    std::memset(out, 0, bytes_of(num_words));
    for (std::size_t i = 0; i < changes.n; ++i) out[changes.positions[i] >> 3] |= u8(1u << (changes.positions[i] & 7));
    return out + bytes_of(num_words);
}

// Eight sign bits as +1 and -1.
struct Signed {
    u16 ones[256][8];
    constexpr Signed() : ones() {
        for (int byte = 0; byte < 256; ++byte) {
            for (int bit = 0; bit < 8; ++bit) ones[byte][bit] = (byte >> bit) & 1 ? 0xFFFF : 1;
        }
    }
};
constexpr Signed kSigned;

[[noreturn]] void corrupt(const char* what) { throw Error(Fault::kCorrupt, what); }

// ---- reading: `in` is a copy of the payload with zeros behind it

Layout read_header(const u8*& in, bool with_classes, bool has_gaps, std::size_t num_words) {
    Layout layout;
    layout.num_classes = with_classes ? kClasses : 1;
    layout.has_gaps = has_gaps;
    BitReader bits(in);
    if (with_classes) layout.top = int(bits.get(kTopBits));
    const unsigned width = bits.get(kWidthBits);
    if (width < 1 || width > 17) corrupt("a block's header gives an impossible width");
    for (int c = 0; c < layout.num_classes; ++c) {
        Class& one = layout.classes[c];
        one.n = bits.get(width);
        if (one.n == 0) continue;
        if (has_gaps) one.gaps.k = bits.get(kParameterBits);
        one.num_exceptions = bits.get(width);
        if (one.num_exceptions > one.n) corrupt("a block has more exceptions than changes");
        if (one.num_exceptions == 0) continue;
        one.exception_gaps.k = bits.get(kParameterBits);
        one.excess.k = bits.get(kParameterBits);
    }
    if (layout.n() < 1 || layout.n() > num_words) corrupt("a block has more changes than words, or none");
    in = bits.finish();
    return layout;
}

// Calls emit(class, index in class, value) for each value of a stream.
template <class Emit>
const u8* read_rice(const Layout& layout, RiceCost Class::* stream, std::size_t Class::* number, const u8* in, const u8* end, Emit emit) {
    u64 low_bits = 0;
    for (int c = 0; c < layout.num_classes; ++c) low_bits += layout.classes[c].*number * u64((layout.classes[c].*stream).k);
    const u8* const low = in;
    if (layout.total(number) == 0) return in;
    if (bytes_of(low_bits) >= std::size_t(end - in)) corrupt("a block ends within its values");
    UnaryReader unary(in + bytes_of(low_bits), end);
    u64 at = 0;
    for (int c = 0; c < layout.num_classes; ++c) {
        const unsigned k = (layout.classes[c].*stream).k;
        const std::size_t n = layout.classes[c].*number;
        const u64 mask = (u64(1) << k) - 1;
        for (std::size_t i = 0; i < n; ++i, at += k) {
            if (!unary.more()) corrupt("a block ends within its values");
            emit(c, i, unary.next() << k | ((load64(low + (at >> 3)) >> (at & 7)) & mask));
        }
    }
    return unary.finish();
}

// Turn gaps into positions or ranks, which must stay below the number of words of their class. Meanwhile the words of `ahead` at these
// positions are prefetched: decoding takes about as long as they take to arrive.
const u8* read_positions(const Layout& layout, const std::size_t* limits, const u8* in, const u8* end, u16* out, const u16* ahead) {
    u64 next = 0, beyond = 0;
    in = read_rice(layout, &Class::gaps, &Class::n, in, end, [&](int c, std::size_t i, u64 gap) {
        next = (i ? next : 0) + gap;
        beyond |= u64(next >= limits[c]);
        __builtin_prefetch(ahead + u16(next), 1);
        *out++ = u16(next++);
    });
    if (beyond && layout.num_classes > 1) throw Error(Fault::kWrongBase, "a level 2 delta does not fit these weights: they are not its base");
    if (beyond) corrupt("a block's changes lie beyond its words");
    return in;
}

const u8* read_values(const Layout& layout, const u8* in, const u8* end, Workspace& ws, u16* diffs) {
    const std::size_t n = layout.n();
    if (bytes_of(n) > std::size_t(end - in)) corrupt("a block ends within its signs");
    for (std::size_t i = 0; i < n; i += 8) std::memcpy(diffs + i, kSigned.ones[in[i / 8]], sizeof kSigned.ones[0]);  // into the slack
    in += bytes_of(n);
    u16* excess = ws.excess;
    const u8* excess_stream = nullptr;
    u16* exception = ws.ranks;  // indices within the class
    u64 next = 0, beyond = 0;
    excess_stream = read_rice(layout, &Class::exception_gaps, &Class::num_exceptions, in, end, [&](int c, std::size_t i, u64 gap) {
        next = (i ? next : 0) + gap;
        beyond |= u64(next >= layout.classes[c].n);
        *exception++ = u16(next++);
    });
    in = read_rice(layout, &Class::excess, &Class::num_exceptions, excess_stream, end, [&](int, std::size_t, u64 value) {
        beyond |= u64(value > 0x7FFE);
        *excess++ = u16(value);
    });
    if (beyond) corrupt("a block's differences are out of range");
    exception = ws.ranks, excess = ws.excess;
    for (int c = 0; c < layout.num_classes; ++c) {
        for (std::size_t i = 0; i < layout.classes[c].num_exceptions; ++i, ++exception, ++excess) {
            u16& diff = diffs[*exception];
            diff = diff == 1 ? u16(*excess + 2) : u16(-int(*excess + 2));
        }
        diffs += layout.classes[c].n;
    }
    return in;
}

const u8* read_pairs(const u8* in, std::size_t size, std::size_t num_words, Changes& out) {
    u16 last;
    std::memcpy(&last, in, 2);
    out.n = std::size_t(last) + 1;
    if (size != 2 + 4 * out.n || out.n > num_words) corrupt("a block of pairs has another size than it says");
    std::memcpy(out.positions, in + 2, 2 * out.n);
    std::memcpy(out.diffs, in + 2 + 2 * out.n, 2 * out.n);
    bool bad = out.positions[out.n - 1] >= num_words;
    for (std::size_t i = 0; i < out.n; ++i) bad |= out.diffs[i] == 0 || (i > 0 && out.positions[i] <= out.positions[i - 1]);
    if (bad) corrupt("a block of pairs is not in order");
    return in + size;
}

const u8* read_dense(const u8* in, std::size_t size, std::size_t num_words, Changes& out) {
    if (size != 2 * num_words) corrupt("a dense block has another size than its words");
    for (std::size_t i = 0; i < num_words; ++i) {
        std::memcpy(&out.diffs[out.n], in + 2 * i, 2);
        out.positions[out.n] = u16(i);
        out.n += out.diffs[out.n] != 0;
    }
    return in + size;
}

const u8* read_bitmap(const u8* in, std::size_t num_words, const u8* end, Workspace& ws, Changes& out) {
    if (bytes_of(num_words) > std::size_t(end - in)) corrupt("a block ends within its bitmap");
    const std::size_t words = (num_words + 63) / 64;
    ws.bitmap[words - 1] = 0;
    std::memcpy(ws.bitmap, in, bytes_of(num_words));
    if (num_words % 64 && ws.bitmap[words - 1] >> (num_words % 64)) corrupt("a block's changes lie beyond its words");
    out.n = kernels().positions(ws.bitmap, words, out.positions, nullptr, nullptr);
    return in + bytes_of(num_words);
}

const u8* read_classes(const Layout& layout, const u8* in, const u8* end, const u16* old_words, std::size_t num_words, Workspace& ws,
                       Changes& out) {
    kernels().classes(old_words, num_words, layout.top, ws.classes);
    std::size_t limits[kClasses];
    for (int c = 0; c < kClasses; ++c) {
        limits[c] = 0;
        for (const u64 bits : ws.classes[c]) limits[c] += std::size_t(__builtin_popcountll(bits));
    }
    in = read_positions(layout, limits, in, end, ws.gaps, old_words);
    std::size_t start = 0;
    for (int c = 0; c < kClasses; ++c) {
        if (layout.classes[c].n == 0) continue;
        kernels().prefix_counts(ws.classes[c], ws.counts);
        kernels().select(ws.classes[c], ws.counts, ws.gaps + start, layout.classes[c].n, out.positions + start);
        start += layout.classes[c].n;
    }
    return in;
}

}  // namespace

// The codec with the smallest exact size is chosen, so no payload is longer than the dense form. Class Rice is written first to know its size.
std::size_t block_room(std::size_t num_words) { return 2 * num_words + kSlack; }

void find_changes(const u16* old_words, const u16* new_words, std::size_t num_words, Workspace& ws, const void* ahead_old,
                  const void* ahead_new) {
    Changes& changes = ws.changes;
    kernels().diff(old_words, new_words, num_words, ws.bitmap);
    changes.n = kernels().positions(ws.bitmap, (num_words + 63) / 64, changes.positions, ahead_old, ahead_new);
    for (std::size_t i = 0; i < changes.n; ++i) {
        ws.old_of_changes[i] = old_words[changes.positions[i]];
        changes.diffs[i] = u16(new_words[changes.positions[i]] - ws.old_of_changes[i]);
    }
}

Coded encode_block(const u16* old_words, std::size_t num_words, Workspace& ws, u8* out) {
    const Changes& changes = ws.changes;
    if (changes.n == 0) return {kEmpty, 0};
    Layout rice;
    rice.classes[0].n = changes.n;
    plan_gaps(changes.positions, rice.classes[0], ws.gaps);
    plan_values(changes.diffs, rice.classes[0], ws.exception_gaps, ws.excess);
    Layout bitmap = rice;
    bitmap.has_gaps = false;

    Coded best{kPairs, 2 + 4 * changes.n};
    const auto offer = [&best](Codec codec, std::size_t size) { best = size < best.size ? Coded{codec, size} : best; };
    offer(kRice, rice.size());
    offer(kBitmap, bytes_of(num_words) + bitmap.size());
    offer(kDense, 2 * num_words);
    if (old_words && best.codec != kPairs && best.codec != kDense) {
        Layout classes = plan_classes(old_words, num_words, ws);
        std::size_t at = 0, exceptions = 0;
        for (Class& one : classes.classes) {
            plan_gaps(ws.ranks + at, one, ws.gaps + at);
            plan_values(ws.diffs + at, one, ws.exception_gaps + exceptions, ws.excess + exceptions);
            at += one.n;
            exceptions += one.num_exceptions;
        }
        offer(kClassRice, classes.size());
        if (best.codec == kClassRice) {
            u8* const gaps = write_header(classes, out);
            write_values(classes, ws.diffs, ws, write_rice(classes, &Class::gaps, &Class::n, ws.gaps, gaps));
            return best;
        }
        plan_gaps(changes.positions, rice.classes[0], ws.gaps);
        plan_values(changes.diffs, rice.classes[0], ws.exception_gaps, ws.excess);
    }
    if (best.codec == kPairs) write_pairs(changes, out);
    if (best.codec == kDense) write_dense(changes, num_words, out);
    if (best.codec == kRice) {
        u8* const gaps = write_header(rice, out);
        write_values(rice, changes.diffs, ws, write_rice(rice, &Class::gaps, &Class::n, ws.gaps, gaps));
    }
    if (best.codec == kBitmap) write_values(bitmap, changes.diffs, ws, write_bitmap(changes, num_words, write_header(bitmap, out)));
    return best;
}

void decode_block(Codec codec, View payload, const u16* old_words, std::size_t num_words, Workspace& ws, Changes& out) {
    if (payload.size > 2 * kBlockWords) corrupt("a block is longer than its words");
    out.n = 0;
    if (codec == kEmpty) return;
    std::memcpy(ws.payload, payload.data, payload.size);
    std::memset(ws.payload + payload.size, 0, kSlack);
    const u8 *in = ws.payload, *const end = in + payload.size;
    if (codec == kPairs) {
        in = read_pairs(in, payload.size, num_words, out);
    } else if (codec == kDense) {
        in = read_dense(in, payload.size, num_words, out);
    } else {
        if (codec == kClassRice && !old_words) throw Error(Fault::kWrongBase, "a level 2 delta can only be read with its base weights");
        const Layout layout = read_header(in, codec == kClassRice, codec != kBitmap, num_words);
        if (in > end) corrupt("a block ends within its header");
        out.n = layout.n();
        if (codec == kBitmap) in = read_bitmap(in, num_words, end, ws, out);
        if (codec == kRice) in = read_positions(layout, &num_words, in, end, out.positions, old_words ? old_words : ws.old_words);
        if (codec == kClassRice) in = read_classes(layout, in, end, old_words, num_words, ws, out);
        if (out.n != layout.n()) corrupt("a block's bitmap has another number of changes than its header");
        in = read_values(layout, in, end, ws, out.diffs);
    }
    if (in != end) corrupt("a block has another size than its contents");
}

}  // namespace flowtrain
