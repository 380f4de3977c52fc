// The block table of a GPU's steps. It stays on the device, row s for sequence s of the step, and a step brings the
// entries that have changed: in decode one of each sequence every block_size tokens. The host keeps what the device
// has, and so knows without a look at the device what a step has to bring, and what has been checked before.
#pragma once

#include <vector>

#include "ops/backend.h"
#include "ops/values.h"

namespace infinilm {

class BlockTable {
public:
    // [rows, columns] int32 in memory of the host: the entries on the device behind all steps that were staged; -1
    // where none was ever written. Absent before the first step.
    TensorView known() const { return known_; }
    // The same on the device. Kept, with what it holds, until there is no room.
    TensorView on_device() const { return device_; }
    // Makes room for so many; see DeviceQueue::while_quiet.
    void reserve(Backend& backend, int64_t num_rows, int64_t num_columns);
    // Entries of a step's table, [num_seqs, max_blocks_per_seq] int32 in memory of the host, as they are sent to the
    // device: [num_entries, 2] int32, the element of the table and what it is to hold.
    std::vector<int32_t> list(const TensorView& table, const std::vector<TableSpan>& spans) const;
    // The device will have them.
    void remember(const TensorView& table, const std::vector<TableSpan>& spans);

private:
    Tensor device_, known_;
};

}  // namespace infinilm
