// The block tables of a GPU's steps, one of each group of layers. They stay on the device, row s for sequence s of the
// step, and a step brings the entries that have changed: in decode one of each sequence every block_size tokens. The
// host keeps a copy of the entries on the device, and so knows without a look at the device which entries a step has to
// bring, and which of them were checked before.
#pragma once

#include <vector>

#include "ops/backend.h"
#include "ops/values.h"

namespace infinilm {

using TableSpans = std::vector<std::vector<TableSpan>>;  // [num_groups]

class BlockTable {
public:
    // A group's entries as the device has them after all steps that were staged, [rows, columns] int32 in memory of
    // the host; -1 where none was ever written. Absent before the first step.
    TensorView known(int group) const { return known_ ? known_.select(0, group) : TensorView(); }
    // The entries of all groups, [num_groups, rows, columns], on the device. Kept until a step needs more room.
    TensorView on_device() const { return device_; }
    // Makes room for so many; see DeviceQueue::while_quiet.
    void reserve(Backend& backend, int64_t num_groups, int64_t num_rows, int64_t num_columns);
    // Entries of a step's tables, [num_groups, num_seqs, max_blocks_per_seq] int32 in memory of the host, as they are
    // sent to the device: [num_entries, 2] int32, the element of on_device() and what it is to hold. spans: of each
    // group.
    std::vector<int32_t> list(const TensorView& tables, const TableSpans& spans) const;
    // The device will have them.
    void remember(const TensorView& tables, const TableSpans& spans);

private:
    Tensor device_, known_;  // [num_groups, rows, columns]
};

}  // namespace infinilm
