// The end of the forward pass: from the last hidden states to logits, and from logits to token ids. Several ranks
// each have the logits of its part of the vocabulary; these are brought together when they are asked for, else only the
// best of each part are, where they decide what is sampled. Masks are not needed before sample().
#pragma once

#include "dist/communicator.h"
#include "model/batch.h"
#include "model/buffers.h"
#include "model/model.h"

namespace infinilm {

class Logits {
public:
    Logits(const ModelSpec& spec, Backend& backend, Communicator& communicator);

    // x: [num_rows, hidden_size], and the norm they still need. The logits of all ranks: [num_rows, >= head.size]
    // float32, padded to a multiple of 8, as kernels of GPUs want them, valid until the next step, on the CPU longer
    // with batch.return_logits. Absent where the best of each rank decide what is sampled, unless all are wanted.
    Tensor compute(const Batch& batch, const LmHead& head, const TensorView& x, const NormPrologue& norm, bool all);
    // StepOutput::sampled of the rows that compute() was last called with, with the same head, and what it gave, whose
    // logits it leaves as they were; valid until the next step. Absent if the batch has no sampling parameters or no
    // rows. Every rank draws the same.
    Tensor sample(const Batch& batch, const LmHead& head, const Tensor& logits);

    // What is kept for steps of up to num_rows rows that are not returned and num_returned_rows that are.
    static int64_t workspace_bytes(const ModelSpec& spec, int num_ranks, int64_t num_rows, int64_t num_returned_rows);

private:
    // Logits of all ranks, [num_rows, num_ranks * part] float32: a rank's part of the vocabulary has `part` columns.
    struct Rows {
        Rows(const ModelSpec& spec, int num_ranks);
        BufferPlan plan;
        Buffer logits;
    };
    struct Ids {
        Ids();
        BufferPlan plan;
        Buffer sampled;  // [num_rows, 1 + 2 * (1 + max_candidates)] int32; StepOutput::sampled is its beginning
    };
    // What only several ranks need.
    struct Parts {
        Parts(const ModelSpec& spec, int num_ranks);
        BufferPlan plan;
        Buffer own;  // [num_rows, part] float32
        Buffer all;  // [num_ranks * num_rows, part] float32: those of rank 0, then those of rank 1, ..
        // The best of each rank, as far as they are wanted: logits, by their bits, then ids. Memory for k =
        // max_candidates, so that other k take no more.
        Buffer best;      // [2 * num_rows, k] int32
        Buffer all_best;  // [num_ranks * 2 * num_rows, k] int32
        Buffer joined;    // [2 * num_rows, num_ranks * k] int32
    };
    // What several ranks sample from where that is enough: the best of rank 0, then those of rank 1, ..
    struct Candidates {
        TensorView logits;  // [num_rows, num_ranks * k] float32
        TensorView ids;     // [num_rows, num_ranks * k] int32
    };

    int num_ranks() const { return communicator_.size(); }
    // Which of the outputs of a head are here, and how many columns they have among those of all ranks.
    Range own_range(const LmHead& head) const;
    int64_t part(const LmHead& head) const;
    // out: [num_rows, head.size], or the rank's part of it
    void run(const LmHead& head, const TensorView& x, const NormPrologue& norm, const TensorView& out);
    // With several ranks: the rank's part, [num_rows, part]. Columns beyond the head's outputs are not written.
    TensorView own_part(const LmHead& head, const TensorView& x, const NormPrologue& norm);
    // [num_rows, >= head.size] float32. On a CPU logits that are returned get memory of their own; a GPU copies them.
    Tensor buffer(const LmHead& head, int64_t num_rows, bool returned);
    void gather(const TensorView& own, const TensorView& out);  // out: [num_rows, num_ranks * part]
    // logits: [num_rows, n], of token ids from first_id on; undo: after the change, they become what they were
    void change(const Batch& batch, const TensorView& logits, int64_t first_id, bool undo = false);
    bool candidates_decide(const Batch& batch) const;
    Candidates gather_candidates(const Batch& batch, const LmHead& head);

    const ModelSpec& spec_;
    Backend& backend_;
    Communicator& communicator_;
    const Rows rows_plan_;
    const Ids ids_plan_;
    const Parts parts_plan_;
    Buffers rows_, ids_, parts_;
};

}  // namespace infinilm
