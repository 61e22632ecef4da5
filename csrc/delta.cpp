#include "delta.h"

#include <algorithm>
#include <cstring>
#include <exception>

#include "block.h"
#include "pool.h"
#include "xxh3.h"

namespace flowtrain {
namespace {

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;

// ---- the header: little-endian, no padding; then for each block 4 bytes (codec in the upper 4 bits, size below) and 8 of checksum

struct Header {
    u8 magic[4];
    u8 format, level, block_log2, reserved;
    u64 num_words, first, num_changed;
    Digest base, target;
    u64 checksum;  // of header and directory, with this field zero
};
static_assert(sizeof(Header) == 72);

constexpr u8 kMagic[4] = {'F', 'T', 'D', 'L'};
constexpr std::size_t kEntry = 12;
constexpr u32 kSizeBits = 28, kSizeMask = (u32(1) << kSizeBits) - 1;

u64 blocks_of(u64 num_words) { return num_words / kBlockWords + (num_words % kBlockWords != 0); }

std::size_t block_words(u64 num_words, std::size_t block) {
    return std::size_t(std::min<u64>(kBlockWords, num_words - u64(block) * kBlockWords));
}

u64 header_checksum(Header header, const u8* directory, std::size_t size) {
    header.checksum = 0;
    const u64 sums[2] = {xxh3(&header, sizeof header), xxh3(directory, size)};
    return xxh3(sums, sizeof sums);
}

struct Entry {
    Codec codec;
    std::size_t size;
    u64 offset, checksum;
};

// A delta whose header was checked: sizes add up to those of the view.
struct Parsed {
    Header header;
    View view;
    std::vector<u64> offsets;

    std::size_t num_blocks() const { return offsets.size(); }

    Entry entry(std::size_t block) const {
        const u8* p = view.data + sizeof(Header) + kEntry * block;
        const u32 packed = load32(p);
        return {Codec(packed >> kSizeBits), packed & kSizeMask, offsets[block], load64(p + 4)};
    }

    View payload(std::size_t block) const {
        const Entry e = entry(block);
        return {view.data + e.offset, e.size};
    }

    void check_payload(std::size_t block) const {
        const View bytes = payload(block);
        if (bytes.size && xxh3(bytes.data, bytes.size) != entry(block).checksum) {
            throw Error(Fault::kCorrupt, "the checksum of block " + std::to_string(block) + " is wrong");
        }
    }
};

Parsed parse(View view) {
    Parsed parsed{{}, view, {}};
    Header& header = parsed.header;
    if (view.size < sizeof(Header)) throw Error(Fault::kNotADelta, "too short to be a delta: " + std::to_string(view.size) + " bytes");
    std::memcpy(&header, view.data, sizeof header);
    if (std::memcmp(header.magic, kMagic, sizeof kMagic) != 0) throw Error(Fault::kNotADelta, "these bytes are not a delta");
    if (header.format > kFormat) {
        throw Error(Fault::kNewerFormat, "the delta has format " + std::to_string(header.format) + "; this code reads up to " +
                                             std::to_string(kFormat) + ", a newer flowtrain is needed");
    }
    const u64 num_blocks = blocks_of(header.num_words);
    if (num_blocks > (view.size - sizeof header) / kEntry) throw Error(Fault::kCorrupt, "the delta ends within its directory");
    const u8* const directory = view.data + sizeof header;
    if (header_checksum(header, directory, kEntry * num_blocks) != header.checksum) {
        throw Error(Fault::kCorrupt, "the checksum of the delta's header is wrong");
    }
    const bool known = header.format == kFormat && (header.level == 1 || header.level == 2) && header.block_log2 == 16;
    if (!known || header.first + header.num_words < header.first || header.num_changed > header.num_words) {
        throw Error(Fault::kCorrupt, "the delta's header is contradictory");
    }
    parsed.offsets.resize(num_blocks);
    u64 offset = sizeof header + kEntry * num_blocks;
    for (std::size_t b = 0; b < num_blocks; ++b) {
        parsed.offsets[b] = offset;
        const Entry e = parsed.entry(b);
        const bool unknown = e.codec >= kNumCodecs || (e.codec == kClassRice && header.level != 2);
        if (unknown || (e.codec == kEmpty) != (e.size == 0) || e.size > 2 * block_words(header.num_words, b)) {
            throw Error(Fault::kCorrupt, "the delta's directory is contradictory at block " + std::to_string(b));
        }
        offset += e.size;
    }
    if (offset != view.size) {
        throw Error(Fault::kCorrupt, "the delta should have " + std::to_string(offset) + " bytes and has " + std::to_string(view.size));
    }
    return parsed;
}

// ---- threads

// The number of shares that `count` items are cut into: at most one per item.
std::size_t shares_of(int num_threads, std::size_t count) {
    return std::clamp<std::size_t>(std::size_t(std::max(num_threads, 1)), 1, std::max<std::size_t>(count, 1));
}

// Run task(share, begin, end) on contiguous shares of `count` items; the first exception is thrown when all have ended.
template <class Task>
void parallel(std::size_t shares, std::size_t count, Task task) {
    if (shares == 1) return task(std::size_t(0), std::size_t(0), count);
    std::vector<std::exception_ptr> errors(shares);
    const auto run = [&](std::size_t t) {
        try {
            task(t, count * t / shares, count * (t + 1) / shares);
        } catch (...) {
            errors[t] = std::current_exception();
        }
    };
    Pool::of_process().run(shares, run);
    for (const std::exception_ptr& error : errors) {
        if (error) std::rethrow_exception(error);
    }
}

// A workspace is larger than a megabyte, so each thread of the pool keeps its own.
Workspace& workspace() {
    thread_local std::unique_ptr<Workspace> mine(new Workspace);
    return *mine;
}

// ---- writing

class Growing {
  public:
    u8* room(std::size_t more) {
        if (bytes_.size + more > capacity_) {
            capacity_ = std::max(bytes_.size + more, 2 * capacity_);
            std::unique_ptr<u8[]> larger(new u8[capacity_]);
            if (bytes_.size) std::memcpy(larger.get(), bytes_.data.get(), bytes_.size);
            bytes_.data = std::move(larger);
        }
        return bytes_.data.get() + bytes_.size;
    }
    void grow(std::size_t more) { bytes_.size += more; }
    const Bytes& bytes() const { return bytes_; }

  private:
    Bytes bytes_;
    std::size_t capacity_ = 0;
};

// The output of one thread for its share of the blocks.
struct Part {
    std::vector<u32> sizes;
    std::vector<u64> checksums;
    Growing payloads;
    u64 num_changed = 0;
    Digest change;

    void add_block(const u16* old_words, std::size_t num_words, Workspace& ws) {
        u8* const out = payloads.room(block_room(num_words));
        const Coded coded = encode_block(old_words, num_words, ws, out);
        sizes.push_back(u32(coded.codec) << kSizeBits | u32(coded.size));
        checksums.push_back(coded.size ? xxh3(out, coded.size) : 0);
        payloads.grow(coded.size);
        num_changed += ws.changes.n;
    }
};

Bytes assemble(const std::vector<Part>& parts, std::size_t num_words, const EncodeOptions& options) {
    Header header{};
    std::memcpy(header.magic, kMagic, sizeof kMagic);
    header.format = kFormat;
    header.level = u8(options.level);
    header.block_log2 = 16;
    header.num_words = num_words;
    header.first = options.first;
    header.base = header.target = options.base;
    Bytes out;
    const std::size_t directory_size = kEntry * std::size_t(blocks_of(num_words));
    out.size = sizeof header + directory_size;
    for (const Part& part : parts) {
        out.size += part.payloads.bytes().size;
        header.num_changed += part.num_changed;
        header.target += part.change;
    }
    out.data.reset(new u8[out.size]);
    u8* entry = out.data.get() + sizeof header;
    u8* payload = entry + directory_size;
    for (const Part& part : parts) {
        for (std::size_t i = 0; i < part.sizes.size(); ++i, entry += kEntry) {
            std::memcpy(entry, &part.sizes[i], 4);
            std::memcpy(entry + 4, &part.checksums[i], 8);
        }
        const Bytes& bytes = part.payloads.bytes();
        if (bytes.size) std::memcpy(payload, bytes.data.get(), bytes.size);
        payload += bytes.size;
    }
    header.checksum = header_checksum(header, out.data.get() + sizeof header, directory_size);
    std::memcpy(out.data.get(), &header, sizeof header);
    return out;
}

void check_level(int level) {
    if (level != 1 && level != 2) throw std::invalid_argument("level must be 1 or 2, not " + std::to_string(level));
}

// ---- reading

const u16* block_of(const u16* words, std::size_t block) { return words ? words + block * kBlockWords : nullptr; }

void read_block(const Parsed& delta, std::size_t block, const u16* old_words, Workspace& ws, Changes& out) {
    decode_block(delta.entry(block).codec, delta.payload(block), old_words, block_words(delta.header.num_words, block), ws, out);
}

// Bring the changes of a block of kClassRice into ascending order.
void sort_changes(Workspace& ws) {
    std::memset(ws.bitmap, 0, sizeof ws.bitmap);
    for (std::size_t i = 0; i < ws.changes.n; ++i) {
        const u16 at = ws.changes.positions[i];
        ws.bitmap[at >> 6] |= u64(1) << (at & 63);
        ws.new_words[at] = ws.changes.diffs[i];
    }
    ws.changes.n = kernels().positions(ws.bitmap, kBitmapWords, ws.changes.positions, nullptr, nullptr);
    for (std::size_t i = 0; i < ws.changes.n; ++i) ws.changes.diffs[i] = ws.new_words[ws.changes.positions[i]];
}

// Where the pairs of each block begin, and where the last ones end.
std::vector<std::size_t> starts_of(const u32* counts, std::size_t num_blocks, u64 num_words, std::size_t num_pairs) {
    std::vector<std::size_t> starts(num_blocks + 1, 0);
    for (std::size_t b = 0; b < num_blocks; ++b) {
        if (counts[b] > block_words(num_words, b)) throw std::invalid_argument("counts[" + std::to_string(b) + "] exceeds the block");
        starts[b + 1] = starts[b] + counts[b];
    }
    if (starts[num_blocks] != num_pairs) throw std::invalid_argument("counts do not add up to the number of pairs");
    return starts;
}

void require_base(const Parsed& delta, const u16* base) {
    if (delta.header.level == 2 && !base) throw Error(Fault::kWrongBase, "a level 2 delta can only be read with its base weights");
}

[[noreturn]] void wrong_base() {
    throw Error(Fault::kWrongBase, "the delta does not lead from these weights to its target: they are not its base, or were damaged");
}

// One block of a delta that is to be added to weights.
struct Step {
    const Parsed* delta;
    std::size_t patch, block;
    u16* words;
};

// A thread's share of `apply`. It keeps its changes, so that they can be undone.
class Applier {
  public:
    Applier(const Step* begin, const Step* end, std::size_t num_patches, std::size_t expected)
        : change(num_patches), num_changed(num_patches), begin_(begin), end_(end) {
        positions_.reserve(expected);
        diffs_.reserve(expected);
        stops_.reserve(std::size_t(end - begin) + 1);
        stops_.push_back(0);
    }

    // Decode a block and prefetch its words while the words of the previous block arrive.
    void run() {
        for (const Step* step = begin_; step != end_; ++step) {
            decode(*step);
            if (step != begin_) write(step[-1]);
        }
        if (begin_ != end_) write(end_[-1]);
    }

    void undo() {
        for (; written_ > 0; --written_) {
            u16* const words = begin_[written_ - 1].words;
            for (std::size_t i = stops_[written_ - 1]; i < stops_[written_]; ++i) words[positions_[i]] = u16(words[positions_[i]] - diffs_[i]);
        }
    }

    std::vector<Digest> change;  // by patch
    std::vector<u64> num_changed;

  private:
    void decode(const Step& step) {
        Changes& changes = workspace().changes;
        read_block(*step.delta, step.block, step.words, workspace(), changes);
        positions_.insert(positions_.end(), changes.positions, changes.positions + changes.n);
        diffs_.insert(diffs_.end(), changes.diffs, changes.diffs + changes.n);
        stops_.push_back(positions_.size());
    }

    void write(const Step& step) {  // nothing in here can fail
        const u64 first = step.delta->header.first + u64(step.block) * kBlockWords;
        const std::size_t begin = stops_[written_], end = stops_[written_ + 1];
        Gathered& old_words = workspace().old_of_changes;
        for (std::size_t i = begin; i < end; ++i) {
            u16& word = step.words[positions_[i]];
            old_words[i - begin] = word;
            word = u16(word + diffs_[i]);
        }
        change[step.patch] += kernels().change(first, positions_.data() + begin, old_words, diffs_.data() + begin, end - begin);
        num_changed[step.patch] += end - begin;
        ++written_;
    }

    const Step *begin_, *end_;
    std::vector<std::size_t> stops_;  // where each step's changes begin in the two arrays, and where the last ones end
    std::vector<u16> positions_, diffs_;
    std::size_t written_ = 0;
};

struct Work {  // a round of `apply`
    std::vector<Parsed> deltas;
    std::vector<Step> steps;
    std::vector<std::unique_ptr<Applier>> appliers;  // one per thread
    u64 num_changed = 0;
};

// Two patches of the same word would race and could not be undone.
void require_apart(const Round& patches) {
    std::vector<std::pair<const u16*, const u16*>> ranges;
    for (const Patch& patch : patches) {
        if (patch.num_words) ranges.emplace_back(patch.words, patch.words + patch.num_words);
    }
    std::sort(ranges.begin(), ranges.end());
    for (std::size_t i = 1; i < ranges.size(); ++i) {
        if (ranges[i].first < ranges[i - 1].second) throw Error(Fault::kWrongLayout, "two patches have words in common");
    }
}

// Add the deltas to each block of the base (or to zeros), then encode the change.
Bytes recode(const std::vector<Parsed>& deltas, const u16* base, const EncodeOptions& options) {
    const std::size_t num_words = deltas[0].header.num_words;
    std::vector<Part> parts(shares_of(options.num_threads, deltas[0].num_blocks()));
    parallel(parts.size(), deltas[0].num_blocks(), [&](std::size_t thread, std::size_t begin, std::size_t end) {
        Workspace& ws = workspace();
        std::unique_ptr<Changes> changes(new Changes);
        for (std::size_t b = begin; b < end; ++b) {
            const std::size_t n = block_words(num_words, b);
            if (base) std::memcpy(ws.old_words, block_of(base, b), 2 * n);
            else std::memset(ws.old_words, 0, 2 * n);
            std::memcpy(ws.new_words, ws.old_words, 2 * n);
            for (const Parsed& delta : deltas) {
                delta.check_payload(b);
                read_block(delta, b, base ? ws.new_words : nullptr, ws, *changes);
                for (std::size_t i = 0; i < changes->n; ++i) {
                    u16& word = ws.new_words[changes->positions[i]];
                    word = u16(word + changes->diffs[i]);
                }
            }
            find_changes(ws.old_words, ws.new_words, n, ws);
            const Changes& found = ws.changes;
            if (base) {
                const u64 first = options.first + u64(b) * kBlockWords;
                parts[thread].change += kernels().change(first, found.positions, ws.old_of_changes, found.diffs, found.n);
            }
            parts[thread].add_block(options.level == 2 ? ws.old_words : nullptr, n, ws);
        }
    });
    const Digest change = deltas.back().header.target - deltas.front().header.base;
    Digest found;
    for (const Part& part : parts) found += part.change;
    if (base && !(found == change)) wrong_base();
    if (!base) parts[0].change = change;
    return assemble(parts, num_words, options);
}

}  // namespace

Bytes encode(const u16* old_words, const u16* new_words, std::size_t num_words, const EncodeOptions& options) {
    check_level(options.level);
    const std::size_t num_blocks = blocks_of(num_words);
    std::vector<Part> parts(shares_of(options.num_threads, num_blocks));
    parallel(parts.size(), num_blocks, [&](std::size_t thread, std::size_t begin, std::size_t end) {
        Workspace& ws = workspace();
        Part& part = parts[thread];
        for (std::size_t b = begin; b < end; ++b) {
            const u16 *const from = block_of(old_words, b), *const to = block_of(new_words, b);
            const std::size_t n = block_words(num_words, b);
            const bool ahead = b + 1 < end && block_words(num_words, b + 1) == kBlockWords;
            find_changes(from, to, n, ws, ahead ? from + n : nullptr, ahead ? to + n : nullptr);
            const Changes& changes = ws.changes;
            part.change += kernels().change(options.first + u64(b) * kBlockWords, changes.positions, ws.old_of_changes, changes.diffs, changes.n);
            part.add_block(options.level == 2 ? from : nullptr, n, ws);
        }
    });
    return assemble(parts, num_words, options);
}

Bytes encode_pairs(const u32* counts, const u16* positions, const u16* diffs, std::size_t num_pairs, std::size_t num_words, Digest change,
                   const EncodeOptions& options) {
    if (options.level != 1) throw std::invalid_argument("pairs can only be encoded at level 1");
    const std::size_t num_blocks = blocks_of(num_words);
    const std::vector<std::size_t> starts = starts_of(counts, num_blocks, num_words, num_pairs);
    std::vector<Part> parts(shares_of(options.num_threads, num_blocks));
    parallel(parts.size(), num_blocks, [&](std::size_t thread, std::size_t begin, std::size_t end) {
        Workspace& ws = workspace();
        for (std::size_t b = begin; b < end; ++b) {
            const std::size_t n = counts[b], limit = block_words(num_words, b);
            for (std::size_t i = 0; i < n; ++i) {
                const u16 position = positions[starts[b] + i];
                const bool ascends = i == 0 || position > positions[starts[b] + i - 1];
                if (!ascends || position >= limit) throw std::invalid_argument("positions must ascend within each block");
                if (diffs[starts[b] + i] == 0) throw std::invalid_argument("diffs must not be zero");
                ws.changes.positions[i] = position;
                ws.changes.diffs[i] = diffs[starts[b] + i];
            }
            ws.changes.n = n;
            parts[thread].add_block(nullptr, limit, ws);
        }
    });
    parts[0].change = change;
    return assemble(parts, num_words, options);
}

Info info(View delta) {
    const Parsed parsed = parse(delta);
    const Header& h = parsed.header;
    Info info{h.level, h.num_words, h.first, h.num_changed, delta.size, h.base, h.target, {}};
    for (std::size_t b = 0; b < parsed.num_blocks(); ++b) ++info.num_blocks[parsed.entry(b).codec];
    return info;
}

Info validate(View view, const u16* base, int num_threads) {
    const Parsed delta = parse(view);
    const Header& h = delta.header;
    require_base(delta, base);
    if (base && !(digest(base, h.num_words, h.first, num_threads) == h.base)) wrong_base();
    std::vector<Digest> change(shares_of(num_threads, delta.num_blocks()));
    std::vector<u64> num_changed(change.size());
    parallel(change.size(), delta.num_blocks(), [&](std::size_t thread, std::size_t begin, std::size_t end) {
        Workspace& ws = workspace();
        for (std::size_t b = begin; b < end; ++b) {
            delta.check_payload(b);
            read_block(delta, b, block_of(base, b), ws, ws.changes);
            num_changed[thread] += ws.changes.n;
            if (!base) continue;
            const Changes& changes = ws.changes;
            for (std::size_t i = 0; i < changes.n; ++i) ws.old_of_changes[i] = block_of(base, b)[changes.positions[i]];
            change[thread] += kernels().change(h.first + u64(b) * kBlockWords, changes.positions, ws.old_of_changes, changes.diffs, changes.n);
        }
    });
    Digest target = h.base;
    for (const Digest& part : change) target += part;
    u64 total = 0;
    for (const u64 part : num_changed) total += part;
    if (total != h.num_changed) throw Error(Fault::kCorrupt, "the delta has another number of changes than its header says");
    if (base && !(target == h.target)) throw Error(Fault::kCorrupt, "the delta does not lead to the digest in its header");
    return info(view);
}

void apply(const std::vector<Round>& rounds, int num_threads) {
    std::vector<Work> all;
    for (const Round& patches : rounds) {
        require_apart(patches);
        Work& work = all.emplace_back();
        work.deltas.reserve(patches.size());  // steps point to them
        for (const Patch& patch : patches) {
            const Parsed& delta = work.deltas.emplace_back(parse(patch.delta));
            if (delta.header.num_words != patch.num_words)
                throw Error(Fault::kWrongLayout, "the delta is for " + std::to_string(delta.header.num_words) +
                                                     " words, the weights have " + std::to_string(patch.num_words));
            work.num_changed += delta.header.num_changed;
            for (std::size_t b = 0; b < delta.num_blocks(); ++b) {
                if (delta.entry(b).codec != kEmpty) work.steps.push_back({&delta, work.deltas.size() - 1, b, patch.words + b * kBlockWords});
            }
        }
        // Damage in transit shows here, before a word is written. The undo below is for deltas that were encoded wrong or meet another base.
        work.appliers.resize(shares_of(num_threads, work.steps.size()));
        parallel(work.appliers.size(), work.steps.size(), [&](std::size_t, std::size_t begin, std::size_t end) {
            for (std::size_t s = begin; s < end; ++s) work.steps[s].delta->check_payload(work.steps[s].block);
        });
    }
    try {
        for (Work& work : all) {
            parallel(work.appliers.size(), work.steps.size(), [&](std::size_t thread, std::size_t begin, std::size_t end) {
                // The header's number is a hint and may be wrong, but it cannot exceed the number of words.
                const std::size_t expected = std::size_t(work.num_changed) / work.appliers.size();
                work.appliers[thread].reset(new Applier(work.steps.data() + begin, work.steps.data() + end, work.deltas.size(), expected));
                work.appliers[thread]->run();
            });
            for (std::size_t p = 0; p < work.deltas.size(); ++p) {
                Digest target = work.deltas[p].header.base;
                u64 total = 0;
                for (const auto& applier : work.appliers)
                    if (applier) target += applier->change[p], total += applier->num_changed[p];
                if (total != work.deltas[p].header.num_changed) throw Error(Fault::kCorrupt, "the delta has another number of changes than its header says");
                if (!(target == work.deltas[p].header.target)) wrong_base();
            }
        }
    } catch (...) {
        for (auto work = all.rbegin(); work != all.rend(); ++work) {
            for (const auto& applier : work->appliers)
                if (applier) applier->undo();
        }
        throw;
    }
}

Pairs decode_pairs(View view, const u16* base, u64 begin, u64 end, int num_threads) {
    const Parsed delta = parse(view);
    require_base(delta, base);
    if (begin > end || end > delta.header.num_words) throw std::invalid_argument("begin and end must be in order and within the delta");
    const std::size_t first_block = std::size_t(begin / kBlockWords), num_read = end > begin ? std::size_t(blocks_of(end)) - first_block : 0;
    const u16 shift = u16(begin % kBlockWords);
    std::vector<Pairs> parts(shares_of(num_threads, num_read));
    parallel(parts.size(), num_read, [&](std::size_t thread, std::size_t from, std::size_t to) {
        Workspace& ws = workspace();
        Changes& found = ws.changes;
        Pairs& part = parts[thread];
        part.counts.resize(std::size_t(blocks_of(end - begin)) + 1);
        const std::size_t expected = std::size_t(std::min(delta.header.num_changed, end - begin)) / parts.size();
        part.positions.reserve(expected);
        part.diffs.reserve(expected);
        for (std::size_t i = from; i < to; ++i) {
            const std::size_t b = first_block + i;
            delta.check_payload(b);
            read_block(delta, b, block_of(base, b), ws, found);
            if (delta.entry(b).codec == kClassRice) sort_changes(ws);
            // A block of the delta ends one block of the run and begins the next.
            const auto place = [&](u64 word) {
                const u64 at = std::clamp<u64>(word, u64(b) * kBlockWords, u64(b + 1) * kBlockWords) - u64(b) * kBlockWords;
                return std::size_t(std::lower_bound(found.positions, found.positions + found.n, at) - found.positions);
            };
            const std::size_t start = place(begin), cut = place(u64(b) * kBlockWords + shift), stop = place(end);
            if (i > 0) part.counts[i - 1] += u32(std::min(cut, stop) - start);
            part.counts[i] += u32(stop - std::min(cut, stop));
            for (std::size_t c = start; c < stop; ++c) found.positions[c] = u16(found.positions[c] - shift);
            part.positions.insert(part.positions.end(), found.positions + start, found.positions + stop);
            part.diffs.insert(part.diffs.end(), found.diffs + start, found.diffs + stop);
        }
    });
    Pairs out = std::move(parts[0]);
    for (std::size_t t = 1; t < parts.size(); ++t) {
        for (std::size_t i = 0; i < out.counts.size(); ++i) out.counts[i] += parts[t].counts[i];
        out.positions.insert(out.positions.end(), parts[t].positions.begin(), parts[t].positions.end());
        out.diffs.insert(out.diffs.end(), parts[t].diffs.begin(), parts[t].diffs.end());
    }
    out.counts.resize(std::size_t(blocks_of(end - begin)));
    const bool is_whole = begin == 0 && end == delta.header.num_words;
    if (out.diffs.size() > delta.header.num_changed || (is_whole && out.diffs.size() != delta.header.num_changed)) {
        throw Error(Fault::kCorrupt, "the delta has another number of changes than its header says");
    }
    return out;
}

Digest scatter(u16* words, std::size_t num_words, const std::vector<u32>& counts, const u16* positions, const u16* diffs, std::size_t num_pairs,
               u64 first, u64 origin, const std::vector<Dim>& dims, int num_threads) {
    const std::vector<std::size_t> starts = starts_of(counts.data(), counts.size(), u64(counts.size()) * kBlockWords, num_pairs);
    u64 room = num_words;  // words from the last place to the end
    if (room == 0) throw std::invalid_argument("the places reach beyond the words");
    for (const Dim& dim : dims) {
        if (dim.size == 0 || dim.stride == 0) throw std::invalid_argument("sizes and strides must not be zero");
        if (dim.to_stride > 0 && dim.size - 1 > (room - 1) / dim.to_stride) throw std::invalid_argument("the places reach beyond the words");
        room -= (dim.size - 1) * dim.to_stride;
    }
    std::vector<Digest> change(shares_of(num_threads, counts.size()));
    parallel(change.size(), counts.size(), [&](std::size_t thread, std::size_t begin, std::size_t end) {
        Workspace& ws = workspace();
        Changes& met = ws.changes;
        u64 offsets[512];  // of words that are on their way while the next ones are found
        for (std::size_t b = begin; b < end; ++b) {
            met.n = 0;
            for (std::size_t c = starts[b]; c < starts[b + 1];) {
                const std::size_t done = met.n, stop = std::min(c + std::size(offsets), starts[b + 1]);
                for (; c < stop; ++c) {
                    u64 rest = first + u64(b) * kBlockWords + positions[c] - origin, offset = 0;  // what is before the origin wraps: it is outside
                    bool is_inside = true;
                    for (const Dim& dim : dims) {
                        const u64 i = dim.stride == 1 ? rest : rest / dim.stride;
                        is_inside &= i < dim.size;
                        offset += i * dim.to_stride;
                        rest -= i * dim.stride;
                    }
                    if (!is_inside || rest != 0) continue;
                    __builtin_prefetch(words + offset, 1);
                    offsets[met.n - done] = offset;
                    met.positions[met.n] = positions[c];
                    met.diffs[met.n++] = diffs[c];
                }
                for (std::size_t i = done; i < met.n; ++i) {
                    u16& word = words[offsets[i - done]];
                    ws.old_of_changes[i] = word;
                    word = u16(word + met.diffs[i]);
                }
            }
            change[thread] += kernels().change(first + u64(b) * kBlockWords, met.positions, ws.old_of_changes, met.diffs, met.n);
        }
    });
    Digest sum;
    for (const Digest& part : change) sum += part;
    return sum;
}

Bytes compose(const std::vector<View>& views, const u16* base, int level, int num_threads) {
    check_level(level);
    if (views.empty()) throw std::invalid_argument("there is nothing to compose");
    if (level == 2 && !base) throw std::invalid_argument("level 2 needs the base weights");
    std::vector<Parsed> deltas;
    for (const View& view : views) {
        deltas.push_back(parse(view));
        const Header &h = deltas.back().header, &start = deltas[0].header;
        require_base(deltas.back(), base);
        if (h.num_words != start.num_words || h.first != start.first) {
            throw Error(Fault::kWrongLayout, "the deltas are for different words");
        }
        if (deltas.size() > 1 && !(deltas[deltas.size() - 2].header.target == h.base)) {
            throw Error(Fault::kWrongBase, "delta " + std::to_string(deltas.size()) + " does not start where the one before it ends");
        }
    }
    const Header& h = deltas[0].header;
    return recode(deltas, base, {h.first, level, h.base, num_threads});
}

Digest digest(const u16* words, std::size_t num_words, u64 first, int num_threads) {
    const std::size_t num_blocks = blocks_of(num_words);
    std::vector<Digest> sums(shares_of(num_threads, num_blocks));
    parallel(sums.size(), num_blocks, [&](std::size_t thread, std::size_t begin, std::size_t end) {
        const std::size_t start = begin * kBlockWords, stop = std::min(num_words, end * kBlockWords);
        if (start < stop) sums[thread] = kernels().digest(words + start, stop - start, first + start);
    });
    Digest sum;
    for (const Digest& part : sums) sum += part;
    return sum;
}

}  // namespace flowtrain
