// CRC-32C (Castagnoli), as in iSCSI, ext4 and Btrfs: the same value on every processor.
#pragma once

#include <cstddef>
#include <cstdint>

namespace penstock {

// The CRC of `nbytes` at `data`; 0 for none.
std::uint32_t crc32c(const void* data, std::size_t nbytes) noexcept;

// The same by table, as on a processor without the instruction.
std::uint32_t crc32c_portable(const void* data, std::size_t nbytes) noexcept;

// The CRC of A followed by B, of their CRCs and the length of B.
std::uint32_t crc32c_join(std::uint32_t a, std::uint32_t b, std::size_t b_nbytes) noexcept;

}  // namespace penstock
