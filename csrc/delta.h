// Sparse, bit-exact deltas between two versions of 16-bit weights.
//
// Weights are arrays of 16-bit words: bf16 or fp16 values, or the halves of wider types. A delta holds, for every word that changed, its
// position and the wrap difference (new - old) mod 2^16. Those differences are an abelian group, so deltas compose by addition and invert
// by negation, bit-exact for NaN payloads, signed zeros and denormals. The format is described in docs/delta-format.md.
//
// Every function here may be called from several threads at once. None reads beyond the given sizes, whatever the bytes of a delta are, and
// only `apply` changes its inputs. Errors are thrown as `Error`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace flowtrain {

inline constexpr std::size_t kBlockWords = 65536;
inline constexpr int kFormat = 1;

// Two sums mod 2^64 over the words of a tensor, each word weighted by a hash of its index: additive over shards, in any order.
// It finds corruption; it is no protection against an adversary.
struct Digest {
    std::uint64_t a = 0, b = 0;

    Digest& operator+=(Digest other) { a += other.a, b += other.b; return *this; }
    friend Digest operator+(Digest x, Digest y) { return {x.a + y.a, x.b + y.b}; }
    friend Digest operator-(Digest x, Digest y) { return {x.a - y.a, x.b - y.b}; }
    friend bool operator==(Digest x, Digest y) { return x.a == y.a && x.b == y.b; }
};

enum class Fault {
    kNotADelta,    // the bytes are something else
    kNewerFormat,  // written by a later version of this code
    kCorrupt,      // truncated, or a checksum or a field is wrong
    kWrongBase,    // the weights are not those that the delta starts from
    kWrongLayout,  // sizes of delta and weights differ, or weights overlap
};

struct Error : std::runtime_error {
    Error(Fault fault, const std::string& what) : std::runtime_error(what), fault(fault) {}
    Fault fault;
};

// Owned bytes that are not zeroed first.
struct Bytes {
    std::unique_ptr<std::uint8_t[]> data;
    std::size_t size = 0;
};

struct View {
    const std::uint8_t* data;
    std::size_t size;
};

struct EncodeOptions {
    std::uint64_t first = 0;  // index of the first word within the whole tensor, when this is a shard of it
    int level = 1;            // 1: can be read alone. 2: smaller, but needs the base weights to be read
    Digest base;              // of the words before the change
    int num_threads = 1;
};

struct Info {
    int level;
    std::uint64_t num_words, first, num_changed, num_bytes;
    Digest base, target;
    std::uint64_t num_blocks[6];  // by codec: empty, pairs, Rice, class Rice, bitmap, dense
};

// The changes of a run of words as they lie in blocks: four bytes each.
struct Pairs {
    std::vector<std::uint32_t> counts;             // one per block of 65,536 words of the run
    std::vector<std::uint16_t> positions, diffs;  // positions are relative to their block and ascending in it
};

// A dimension of words that are copied elsewhere: `size` of them, `stride` words apart there, `to_stride` here.
struct Dim {
    std::uint64_t size, stride, to_stride;
};

struct Patch {
    View delta;
    std::uint16_t* words;
    std::size_t num_words;
};
using Round = std::vector<Patch>;  // no two of them may have words in common

// Encode the delta from `old_words` to `new_words`, in one pass over both.
Bytes encode(const std::uint16_t* old_words, const std::uint16_t* new_words, std::size_t num_words, const EncodeOptions& options);

// Encode the same bytes as `encode` at level 1, from changes that were found on a GPU. `counts` has one number per block of 65,536
// words; positions are relative to their block and ascending in it. `change` is the digest of the new words minus that of the old ones.
Bytes encode_pairs(const std::uint32_t* counts, const std::uint16_t* positions, const std::uint16_t* diffs, std::size_t num_pairs,
                   std::size_t num_words, Digest change, const EncodeOptions& options);

// Return the fields of the header, after its checksum was verified.
Info info(View delta);

// Check checksums and structure and, with `base` (required at level 2), the digests.
Info validate(View delta, const std::uint16_t* base, int num_threads);

// Add the deltas to the words in place, round after round: all of them, or none when any is refused.
void apply(const std::vector<Round>& rounds, int num_threads);

// The inverse of `encode_pairs`, of the words from `begin` to `end` - 1 of the delta: their blocks are counted from `begin`. Only blocks with
// a word of them are read and checked. Level 2 needs `base`, of all words of the delta.
Pairs decode_pairs(View delta, const std::uint16_t* base, std::uint64_t begin, std::uint64_t end, int num_threads);

// Add changes of a tensor to copies of its words, and return how that changes the digest. Word `origin` + sum_d i_d * stride_d of the tensor is
// words[sum_d i_d * to_stride_d]; strides descend, and no word comes twice. Changes of other words are left out. `first`: the word of the
// tensor that blocks are counted from. Nothing is written when it throws; with -diffs it puts every bit back.
Digest scatter(std::uint16_t* words, std::size_t num_words, const std::vector<std::uint32_t>& counts, const std::uint16_t* positions,
               const std::uint16_t* diffs, std::size_t num_pairs, std::uint64_t first, std::uint64_t origin, const std::vector<Dim>& dims,
               int num_threads);

// Compose consecutive deltas into one. With `base`, the words before the first, level 2 can be read and written, and a wrong base is
// refused.
Bytes compose(const std::vector<View>& deltas, const std::uint16_t* base, int level, int num_threads);

Digest digest(const std::uint16_t* words, std::size_t num_words, std::uint64_t first, int num_threads);

// Choose the instruction set: "scalar", "avx2", "avx512", or "best". False when this machine lacks it. The bytes never depend on it.
bool use_isa(const std::string& name);
std::string isa();

}  // namespace flowtrain
