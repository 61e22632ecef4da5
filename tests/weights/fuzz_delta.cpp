// Mutated deltas against the reader, under AddressSanitizer and UBSan:  fuzz_delta CASES SEED
//
// Every case must end in the named error or in exactly the words that the delta promises. Anything else aborts.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>

#include "../../csrc/delta.h"
#include "../../csrc/xxh3.h"

using namespace flowtrain;
using Vec = std::vector<std::uint8_t>;
using Words = std::vector<std::uint16_t>;

namespace {

std::mt19937_64 rng;

std::size_t below(std::size_t n) { return n ? std::size_t(rng() % n) : 0; }

constexpr std::size_t kHeader = 72, kEntry = 12;

struct Case {
    Words old_words, new_words;
    Vec delta;
};

Case make_case() {
    const std::size_t sizes[] = {1, 2, 63, 64, 65, 1000, 65535, 65536, 65537, 140000};
    const double densities[] = {0.00005, 0.001, 0.01, 0.1, 0.3, 0.6, 1.0};
    const std::size_t n = below(3) ? 1 + below(3000) : sizes[below(10)];
    const double density = densities[below(7)];
    const int kind = int(below(3));
    Case c{Words(n), {}, {}};
    for (auto& w : c.old_words) w = std::uint16_t(0x3C00 + (rng() & 0x80FF) - (rng() & 0x7FF));
    c.new_words = c.old_words;
    for (auto& w : c.new_words) {
        if (double(rng() >> 11) * 0x1p-53 >= density) continue;
        w = std::uint16_t(kind == 0 ? w + (rng() & 1 ? 1 : -1) : kind == 1 ? rng() : w + std::int64_t(below(9)) - 4);
    }
    EncodeOptions options;
    options.first = below(2) ? 0 : rng() >> 20;
    options.level = 1 + int(below(2));
    options.base = digest(c.old_words.data(), n, options.first, 1);
    const Bytes bytes = encode(c.old_words.data(), c.new_words.data(), n, options);
    c.delta.assign(bytes.data.get(), bytes.data.get() + bytes.size);
    return c;
}

template <class T>
void put(Vec& v, std::size_t at, T value) {
    if (at + sizeof value <= v.size()) std::memcpy(v.data() + at, &value, sizeof value);
}

// Make every checksum right again, so that the damage reaches the code behind them.
void reseal(Vec& v) {
    if (v.size() < kHeader) return;
    std::uint64_t num_words, zero = 0;
    std::memcpy(&num_words, v.data() + 8, 8);
    const std::uint64_t blocks = num_words / kBlockWords + (num_words % kBlockWords != 0);
    if (blocks > (v.size() - kHeader) / kEntry) return;
    std::size_t at = kHeader + kEntry * blocks;
    for (std::size_t b = 0; b < blocks; ++b) {
        std::uint32_t packed;
        std::memcpy(&packed, v.data() + kHeader + kEntry * b, 4);
        const std::size_t size = packed & 0xFFFFFFF;
        if (size > v.size() - at) break;
        put(v, kHeader + kEntry * b + 4, size ? xxh3(v.data() + at, size) : 0);
        at += size;
    }
    put(v, 64, zero);
    const std::uint64_t sums[2] = {xxh3(v.data(), kHeader), xxh3(v.data() + kHeader, kEntry * blocks)};
    put(v, 64, xxh3(sums, sizeof sums));
}

void mutate(Vec& v) {
    const std::size_t start = below(2) ? std::min(v.size(), kHeader) : 0;  // the header is small: aim behind it half of the time
    const auto at = [&] { return start + below(v.size() - start); };
    switch (below(8)) {
        case 0:
            for (std::size_t i = 1 + below(8); i > 0 && !v.empty(); --i) v[std::min(at(), v.size() - 1)] ^= std::uint8_t(1u << below(8));
            break;
        case 1: v.resize(below(v.size() + 1)); break;
        case 2: v.insert(v.end(), 1 + below(40), std::uint8_t(rng())); break;
        case 3: put(v, at(), rng()); break;
        case 4: put(v, at(), std::uint64_t(below(2) ? ~0ull : 1ull << below(64))); break;
        case 5: put(v, 8 + 8 * below(7), rng() >> below(64)); break;  // a field of the header
        case 6: {  // swap two ranges
            if (v.size() < 4) break;
            const std::size_t n = 1 + below(v.size() / 2), a = below(v.size() - n), b = below(v.size() - n);
            const Vec copy = v;
            std::memcpy(v.data() + a, copy.data() + b, n);
            std::memcpy(v.data() + b, copy.data() + a, n);
            break;
        }
        case 7: {  // codec and size of a block
            const std::size_t entry = kHeader + kEntry * below(2);
            put(v, entry, std::uint32_t(below(7) << 28 | below(2 * v.size() + 1)));
        }
    }
}

void fail(const char* what) {
    std::fprintf(stderr, "FAILED: %s\n", what);
    std::abort();
}

const char* kNames[] = {"not a delta", "newer format", "corrupt", "wrong base", "wrong layout"};
std::map<std::string, long> counts;

template <class Call>
bool attempt(Call call) {  // true when the call went through; anything but Error ends the program
    try {
        call();
        return true;
    } catch (const Error& error) {
        ++counts[kNames[int(error.fault)]];
        return false;
    }
}

void try_case(Case& c, const Vec& mutated) {
    // Exactly as long as it is, on the heap: a read beyond it is seen.
    std::unique_ptr<std::uint8_t[]> exact(new std::uint8_t[mutated.size()]);
    if (!mutated.empty()) std::memcpy(exact.get(), mutated.data(), mutated.size());
    const View view{exact.get(), mutated.size()};
    const int threads = 1 + int(below(8) == 0);
    Words words(c.old_words);
    words.shrink_to_fit();
    if (attempt([&] { apply({Round{{view, words.data(), words.size()}}}, threads); })) {
        ++counts["applied"];
        const Info i = info(view);
        const Digest change = digest(words.data(), words.size(), i.first, 1) - digest(c.old_words.data(), words.size(), i.first, 1);
        if (!(change == i.target - i.base)) fail("applied words do not have the promised digest");
    } else if (words != c.old_words) {
        fail("a refused delta changed the words");
    }
    Info i{};
    const bool readable = attempt([&] { i = info(view); });
    const std::uint16_t* const base = readable && i.num_words == words.size() && below(2) ? c.old_words.data() : nullptr;
    attempt([&] { validate(view, base, threads); });
    const std::size_t end = below(std::size_t(i.num_words) + 1), begin = below(end + 1);
    attempt([&] {
        const Pairs pairs = decode_pairs(view, base, begin, end, threads);
        Words part(end - begin);
        if (!part.empty()) {
            scatter(part.data(), part.size(), pairs.counts, pairs.positions.data(), pairs.diffs.data(), pairs.diffs.size(), begin, begin,
                    {{part.size(), 1, 1}}, threads);
        }
    });
    attempt([&] { compose({view, view}, base, 1, threads); });
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 3) return 2;
    rng.seed(std::strtoull(argv[2], nullptr, 10));
    const long num_cases = std::atol(argv[1]);
    long cases = 0;
    while (cases < num_cases) {
        Case c = make_case();
        Words words(c.old_words);
        flowtrain::apply({Round{{{c.delta.data(), c.delta.size()}, words.data(), words.size()}}}, 1);
        if (words != c.new_words) fail("an intact delta did not lead to its target");
        for (int i = 0; i < 20; ++i, ++cases) {
            Vec mutated = c.delta;
            for (std::size_t m = 1 + below(3); m > 0; --m) mutate(mutated);
            if (below(4)) reseal(mutated);
            try_case(c, mutated);
        }
    }
    std::printf("cases %ld", cases);
    for (const auto& [name, count] : counts) std::printf(", %s %ld", name.c_str(), count);
    std::printf("\n");
}
