#include "sums.h"

#include <algorithm>
#include <utility>

#include "crc32c.h"

namespace penstock {

PieceSums::PieceSums(std::vector<SummedArray> arrays, std::size_t numel, std::size_t piece)
    : arrays_(std::move(arrays)),
      numel_(numel),
      piece_(piece),
      sums_(arrays_.size() * (numel / piece + (numel % piece != 0))) {}

void PieceSums::before(std::size_t begin) noexcept {
  Sums* sums = sums_.data() + begin / piece_ * arrays_.size();
  for (const SummedArray& array : arrays_) {
    sums->before = sums->after = sum(array, begin);
    ++sums;
  }
}

void PieceSums::after(std::size_t begin) noexcept {
  Sums* sums = sums_.data() + begin / piece_ * arrays_.size();
  for (const SummedArray& array : arrays_) {
    if (array.changes) sums->after = sum(array, begin);
    ++sums;
  }
}

std::vector<Sums> PieceSums::join() const {
  std::vector<Sums> joined(arrays_.size());
  auto of_piece = sums_.begin();
  for (std::size_t begin = 0; begin < numel_; begin += piece_) {
    for (std::size_t i = 0; i < arrays_.size(); ++i, ++of_piece) {
      const std::size_t nbytes = arrays_[i].offset(end_of(begin)) - arrays_[i].offset(begin);
      joined[i].before = crc32c_join(joined[i].before, of_piece->before, nbytes);
      joined[i].after = crc32c_join(joined[i].after, of_piece->after, nbytes);
    }
  }
  return joined;
}

std::size_t PieceSums::end_of(std::size_t begin) const noexcept { return std::min(begin + piece_, numel_); }

std::uint32_t PieceSums::sum(const SummedArray& array, std::size_t begin) const noexcept {
  const std::size_t first = array.offset(begin);
  return crc32c(static_cast<const char*>(array.data) + first, array.offset(end_of(begin)) - first);
}

}  // namespace penstock
