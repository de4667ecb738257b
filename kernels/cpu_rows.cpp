// Rows of token ids: read from a mapped file with their check, and laid out as a language model reads
// them (ids, labels and document numbers) in one pass each.
//
// A unit is `length` + 1 stored ids, the last one being the label of the one before; it is cut into
// rows of `row` ids. Legend: U units.

#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t STRIDE = 64;  // ids looked at together: an end of a document is rare

// `count` ids of a row, in its document of that number; returns the number of the one after them.
template <typename Id>
inline int32_t lay_out_some(const Id *__restrict ids, int64_t count, Id eos, int64_t label_at_end,
                            int32_t number, int64_t *__restrict tokens, int64_t *__restrict labels,
                            int32_t *__restrict numbers) {
    Id found = 0;
    for (int64_t i = 0; i < count; ++i) tokens[i] = ids[i];
    for (int64_t i = 0; i < count; ++i) labels[i] = ids[i + 1];
    for (int64_t i = 0; i < count; ++i) numbers[i] = number;
    for (int64_t i = 0; i < count; ++i) found |= ids[i] == eos;
    if (!found) return number;
    for (int64_t i = 0; i < count; ++i) {
        numbers[i] = number;
        if (ids[i] != eos) continue;
        ++number;
        if (label_at_end < 0) labels[i] = label_at_end;
    }
    return number;
}

template <typename Id>
void lay_out_unit(const Id *ids, int64_t length, int64_t row, Id eos, int64_t label_at_end,
                  int64_t *tokens, int64_t *labels, int32_t *numbers) {
    for (int64_t start = 0; start < length; start += row) {
        int32_t number = 0;
        for (int64_t at = start; at < start + row; at += STRIDE) {
            const int64_t left = start + row - at;
            // Written twice, so that the compiler knows how many ids the usual case has.
            number = left >= STRIDE
                         ? lay_out_some(ids + at, STRIDE, eos, label_at_end, number, tokens + at,
                                        labels + at, numbers + at)
                         : lay_out_some(ids + at, left, eos, label_at_end, number, tokens + at,
                                        labels + at, numbers + at);
        }
    }
}

template <typename Id>
void lay_out_units(const Id *ids, int64_t units, int64_t length, int64_t row, int64_t eos,
                   int64_t label_at_end, int64_t *tokens, int64_t *labels, int32_t *numbers) {
    for (int64_t u = 0; u < units; ++u)
        lay_out_unit(ids + u * (length + 1), length, row, static_cast<Id>(eos), label_at_end,
                     tokens + u * length, labels + u * length, numbers + u * length);
}

constexpr int64_t BLOCK = 512;  // bytes under one sum, as in pipeline/data/blocks.py

uint64_t sum_of_block(const uint8_t *bytes) {
    uint64_t sum = 0;
    for (int64_t i = 0; i < BLOCK; i += 8) {
        uint64_t word;
        std::memcpy(&word, bytes + i, 8);
        sum += word;
    }
    return sum;
}

// Whether the blocks that bytes begin .. end - 1 of a file lie in have their sums.
bool is_intact(const uint8_t *file, int64_t size, const uint64_t *sums, int64_t begin, int64_t end) {
    int64_t at = begin / BLOCK * BLOCK;
    bool same = true;
    for (; at < end && at + BLOCK <= size; at += BLOCK)
        same &= sum_of_block(file + at) == sums[at / BLOCK];
    if (at >= end) return same;
    uint8_t last[BLOCK] = {};  // an incomplete last block counts as if zeros followed
    std::memcpy(last, file + at, size - at);
    return same & (sum_of_block(last) == sums[at / BLOCK]);
}

// Where a range begins: in a mapped file of `size` bytes, which has these sums. Four words of 64 bits.
struct Place {
    const uint8_t *file;
    int64_t size;
    const uint64_t *sums;
    int64_t begin;
};
static_assert(sizeof(Place) == 4 * sizeof(int64_t));

constexpr int64_t LINE = 64;  // bytes that the processor fetches at once

}  // namespace

extern "C" {

// Copy `num` ranges of `count` bytes to `out`, one after the other; `intact` says of each whether the
// blocks it lies in have their sums. A range of no file is not intact, and nothing is written for it.
void read_ranges(const Place *places, int64_t num, int64_t count, uint8_t *out, uint8_t *intact) {
    for (int64_t k = 0; k < num; ++k) {
        const Place &place = places[k];
        if (k + 1 < num && places[k + 1].file)  // comes from memory while this one is summed
            for (int64_t at = 0; at < count; at += LINE)
                __builtin_prefetch(places[k + 1].file + places[k + 1].begin + at);
        intact[k] = place.file && is_intact(place.file, place.size, place.sums, place.begin,
                                            place.begin + count);
        if (place.file) std::memcpy(out + k * count, place.file + place.begin, count);
    }
}

// ids [U, length + 1] of `size` bytes each -> tokens, labels, numbers [U * length].
// A document's last id gets `label_at_end` as its label where that is negative, else what follows.
void lay_out_rows(const void *ids, int size, int64_t units, int64_t length, int64_t row,
                  int64_t eos, int64_t label_at_end, int64_t *tokens, int64_t *labels,
                  int32_t *numbers) {
    if (size == 2)
        lay_out_units(static_cast<const uint16_t *>(ids), units, length, row, eos, label_at_end,
                      tokens, labels, numbers);
    else
        lay_out_units(static_cast<const uint32_t *>(ids), units, length, row, eos, label_at_end,
                      tokens, labels, numbers);
}

}  // extern "C"
