// flowtrain._delta: the functions of delta.h on numpy arrays. They borrow their inputs without copying and release the GIL.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <optional>

#include "delta.h"
#include "xxh3.h"

namespace py = pybind11;
using namespace py::literals;

namespace {

using namespace flowtrain;

using Words = py::array_t<std::uint16_t, py::array::c_style>;
using Counts = py::array_t<std::uint32_t, py::array::c_style>;
using Octets = py::array_t<std::uint8_t, py::array::c_style>;
using Sums = std::pair<std::uint64_t, std::uint64_t>;
using DeltasAndWords = std::pair<std::vector<Octets>, std::vector<Words>>;
using GilFree = py::gil_scoped_release;

Digest to_digest(Sums sums) { return {sums.first, sums.second}; }
Sums to_sums(Digest digest) { return {digest.a, digest.b}; }

const Words& aligned(const Words& words) {  // an array at an odd offset of a file is not aligned
    if (reinterpret_cast<std::uintptr_t>(words.data()) % alignof(std::uint16_t)) throw py::value_error("words must lie at an even address");
    return words;
}

int at_least_one(int num_threads) {
    if (num_threads < 1) throw py::value_error("num_threads must be at least 1, not " + std::to_string(num_threads));
    return num_threads;
}

View view(const Octets& bytes) { return {bytes.data(), std::size_t(bytes.size())}; }

const std::uint16_t* base_of(const std::optional<Words>& base, View delta) {
    if (!base) return nullptr;
    const std::uint64_t wanted = info(delta).num_words;
    if (std::uint64_t(base->size()) != wanted) {
        throw Error(Fault::kWrongLayout,
                    "the delta is for " + std::to_string(wanted) + " words, base has " + std::to_string(base->size()));
    }
    return aligned(*base).data();
}

Octets to_array(Bytes bytes) {
    std::uint8_t* const data = bytes.data.release();
    py::capsule owner(data, [](void* p) { delete[] static_cast<std::uint8_t*>(p); });
    return Octets(py::ssize_t(bytes.size), data, owner);
}

template <class T>
py::array_t<T> to_array(std::vector<T> values) {
    auto* const kept = new std::vector<T>(std::move(values));
    py::capsule owner(kept, [](void* p) { delete static_cast<std::vector<T>*>(p); });
    return py::array_t<T>(py::ssize_t(kept->size()), kept->data(), owner);
}

Octets encode_words(const Words& old_words, const Words& new_words, std::uint64_t first, int level, Sums base_digest, int num_threads) {
    if (old_words.size() != new_words.size()) {
        throw Error(Fault::kWrongLayout, "old has " + std::to_string(old_words.size()) + " words, new has " + std::to_string(new_words.size()));
    }
    const std::uint16_t *const from = aligned(old_words).data(), *const to = aligned(new_words).data();
    const EncodeOptions options{first, level, to_digest(base_digest), at_least_one(num_threads)};
    Bytes out;
    {
        GilFree free;
        out = encode(from, to, std::size_t(new_words.size()), options);
    }
    return to_array(std::move(out));
}

Octets encode_found(const Counts& counts, const Words& positions, const Words& diffs,
                    std::size_t num_words, Sums change, std::uint64_t first, Sums base_digest, int num_threads) {
    if (std::size_t(counts.size()) != (num_words + kBlockWords - 1) / kBlockWords) {
        throw py::value_error("counts must have one number per block of 65,536 words");
    }
    if (positions.size() != diffs.size()) throw py::value_error("positions and diffs differ in length");
    const EncodeOptions options{first, 1, to_digest(base_digest), at_least_one(num_threads)};
    if (reinterpret_cast<std::uintptr_t>(counts.data()) % alignof(std::uint32_t)) throw py::value_error("counts must be aligned");
    const std::uint16_t *const at = aligned(positions).data(), *const by = aligned(diffs).data();
    Bytes out;
    {
        GilFree free;
        out = encode_pairs(counts.data(), at, by, std::size_t(diffs.size()), num_words, to_digest(change), options);
    }
    return to_array(std::move(out));
}

py::tuple decode_blocks(const Octets& delta, const std::optional<Words>& base, std::uint64_t begin, std::optional<std::uint64_t> end,
                        int num_threads) {
    at_least_one(num_threads);
    const std::uint16_t* const words = base_of(base, view(delta));
    Pairs found;
    {
        GilFree free;
        found = decode_pairs(view(delta), words, begin, end ? *end : info(view(delta)).num_words, num_threads);
    }
    return py::make_tuple(to_array(std::move(found.counts)), to_array(std::move(found.positions)), to_array(std::move(found.diffs)));
}

Sums scatter_to(Words& words, const Counts& counts, const Words& positions, const Words& diffs, std::uint64_t first, std::uint64_t origin,
                const std::vector<std::array<std::uint64_t, 3>>& dims, int num_threads) {
    if (positions.size() != diffs.size()) throw py::value_error("positions and diffs differ in length");
    std::vector<Dim> places;
    for (const auto& [size, stride, to_stride] : dims) places.push_back({size, stride, to_stride});
    const std::vector<std::uint32_t> by_block(counts.data(), counts.data() + counts.size());
    const std::uint16_t *const at = aligned(positions).data(), *const by = aligned(diffs).data();
    aligned(words);
    std::uint16_t* const to = words.mutable_data();  // raises when read-only
    at_least_one(num_threads);
    GilFree free;
    return to_sums(scatter(to, std::size_t(words.size()), by_block, at, by, std::size_t(diffs.size()), first, origin, places, num_threads));
}

py::dict to_dict(const Info& info) {
    py::list blocks;
    for (const std::uint64_t n : info.num_blocks) blocks.append(n);
    return py::dict("level"_a = info.level, "num_words"_a = info.num_words, "first"_a = info.first, "num_changed"_a = info.num_changed,
                    "num_bytes"_a = info.num_bytes, "base_digest"_a = to_sums(info.base), "target_digest"_a = to_sums(info.target),
                    "num_blocks"_a = blocks);
}

void apply_rounds(std::vector<DeltasAndWords> rounds, int num_threads) {
    at_least_one(num_threads);
    std::vector<Round> patches;
    for (auto& [deltas, words] : rounds) {
        if (deltas.size() != words.size()) throw py::value_error("deltas and words differ in length");
        Round& round = patches.emplace_back();
        for (std::size_t i = 0; i < deltas.size(); ++i) {
            aligned(words[i]);
            round.push_back({view(deltas[i]), words[i].mutable_data(), std::size_t(words[i].size())});  // raises when read-only
        }
    }
    GilFree free;
    flowtrain::apply(patches, num_threads);
}

Octets compose_all(const std::vector<Octets>& deltas, const std::optional<Words>& base, int level, int num_threads) {
    at_least_one(num_threads);
    std::vector<View> views;
    for (const Octets& delta : deltas) views.push_back(view(delta));
    const std::uint16_t* const words = deltas.empty() ? nullptr : base_of(base, views[0]);
    Bytes out;
    {
        GilFree free;
        out = compose(views, words, level, num_threads);
    }
    return to_array(std::move(out));
}

}  // namespace

PYBIND11_MODULE(_delta, m) {
    m.doc() = "Sparse, bit-exact deltas between versions of 16-bit weights. Words are contiguous uint16 arrays, deltas uint8 arrays, and a "
              "digest is two integers below 2^64.";

    static PyObject* const base = PyErr_NewExceptionWithDoc("flowtrain._delta.DeltaError", "A delta was refused.", PyExc_ValueError, nullptr);
    m.add_object("DeltaError", py::reinterpret_borrow<py::object>(base));
    static PyObject* kinds[5];
    const std::pair<const char*, const char*> names[5] = {
        {"NotADelta", "The bytes are something else."},
        {"NewerFormat", "The delta was written by a later version."},
        {"CorruptDelta", "The delta is truncated, or a checksum or field of it is wrong."},
        {"WrongBase", "The weights are not those that the delta starts from."},
        {"WrongLayout", "Delta and weights differ in size, or weights overlap."},
    };
    for (int i = 0; i < 5; ++i) {
        const std::string full = std::string("flowtrain._delta.") + names[i].first;
        kinds[i] = PyErr_NewExceptionWithDoc(full.c_str(), names[i].second, base, nullptr);
        m.add_object(names[i].first, py::reinterpret_borrow<py::object>(kinds[i]));
    }
    py::register_exception_translator([](std::exception_ptr thrown) {
        try {
            if (thrown) std::rethrow_exception(thrown);
        } catch (const Error& error) {
            PyErr_SetString(kinds[int(error.fault)], error.what());
        }
    });

    // noconvert: a wrong dtype or stride is an error, not a copy.
    m.def("encode", &encode_words, "old"_a.noconvert(), "new"_a.noconvert(), py::kw_only(), "first"_a = 0, "level"_a = 1,
          "base_digest"_a = Sums{0, 0}, "num_threads"_a = 1,
          "Encode the delta from `old` to `new`. `first`: index of the first word within its tensor. `level` 2 is smaller and can only be "
          "read with the old words. `base_digest`: digest of the old words.");
    m.def("encode_pairs", &encode_found, "counts"_a.noconvert(), "positions"_a.noconvert(), "diffs"_a.noconvert(), "num_words"_a,
          "change"_a, py::kw_only(), "first"_a = 0, "base_digest"_a = Sums{0, 0}, "num_threads"_a = 1,
          "The bytes of `encode` at level 1 from changes found elsewhere: their number per block of 65,536 words, ascending positions in "
          "the block, wrap differences, and the change of the digest.");
    m.def("info", [](const Octets& delta) { return to_dict(info(view(delta))); }, "delta"_a.noconvert(), "What the checked header says.");
    m.def("validate",
          [](const Octets& delta, const std::optional<Words>& base, int num_threads) {
              at_least_one(num_threads);
              const std::uint16_t* const words = base_of(base, view(delta));
              Info result;
              {
                  GilFree free;
                  result = validate(view(delta), words, num_threads);
              }
              return to_dict(result);
          },
          "delta"_a.noconvert(), "base"_a.noconvert() = py::none(), py::kw_only(), "num_threads"_a = 1,
          "Check checksums and structure; with `base`, which level 2 needs, also the digests.");
    m.def("apply", [](std::vector<Octets> deltas, std::vector<Words> words, int num_threads) { apply_rounds({DeltasAndWords(deltas, words)}, num_threads); },
          "deltas"_a.noconvert(), "words"_a.noconvert(), py::kw_only(), "num_threads"_a = 1,
          "Add each delta to its words in place: all of them, or none when one is refused.");
    m.def("apply_rounds", &apply_rounds, "rounds"_a.noconvert(), py::kw_only(), "num_threads"_a = 1,
          "`apply` for several pairs of deltas and words, one after another: all of them, or none when one is refused.");
    m.def("decode_pairs", &decode_blocks, "delta"_a.noconvert(), "base"_a.noconvert() = py::none(), py::kw_only(), "begin"_a = 0,
          "end"_a = py::none(), "num_threads"_a = 1,
          "The inverse of `encode_pairs`, of words `begin` to `end` - 1 of the delta: changes per block of 65,536 words from `begin` on, "
          "ascending positions in the block, wrap differences.");
    m.def("scatter", &scatter_to, "words"_a.noconvert(), "counts"_a.noconvert(), "positions"_a.noconvert(), "diffs"_a.noconvert(), py::kw_only(),
          "first"_a, "origin"_a, "dims"_a, "num_threads"_a = 1,
          "Add changes of a tensor, whose blocks begin at its word `first`, to copies of its words, and return the digest change. Word `origin` "
          "+ sum of i * stride is words[sum of i * to_stride], over `dims` of (size, stride, to_stride); other words are left out.");
    m.def("compose", &compose_all, "deltas"_a.noconvert(), "base"_a.noconvert() = py::none(), py::kw_only(), "level"_a = 1, "num_threads"_a = 1,
          "One delta for several that follow each other.");
    m.def("digest",
          [](const Words& words, std::uint64_t first, int num_threads) {
              at_least_one(num_threads);
              const std::uint16_t* const data = aligned(words).data();
              GilFree free;
              return to_sums(digest(data, std::size_t(words.size()), first, num_threads));
          },
          "words"_a.noconvert(), py::kw_only(), "first"_a = 0, "num_threads"_a = 1,
          "Two sums mod 2^64 over the words; additive over the pieces of a tensor.");
    m.def("xxh3",
          [](const Octets& bytes) {
              const View all = view(bytes);
              GilFree free;
              return xxh3(all.data, all.size);
          },
          "bytes"_a.noconvert(), "XXH3, 64 bits.");
    m.def("isa", &isa, "The instruction set in use: scalar, avx2 or avx512.");
    m.def("use_isa", &use_isa, "name"_a, "Choose an instruction set, or \"best\"; False when the machine lacks it. Results do not depend on it.");
    m.attr("BLOCK_WORDS") = kBlockWords;
}
