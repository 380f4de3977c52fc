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
    Logits(const Model& model, Backend& backend, Communicator& communicator);

    // x: [num_rows, hidden_size], and the norm they still need. The logits of all ranks: [num_rows, >= vocab_size]
    // float32, padded to a multiple of 8, as kernels of GPUs want them, valid until the next step, on the CPU longer
    // with batch.return_logits. Absent where the best of each rank decide what is sampled, unless all are wanted.
    Tensor compute(const Batch& batch, const TensorView& x, const NormPrologue& norm, bool all);
    // StepOutput::sampled of the rows that compute() was last called with, and what it gave, whose logits it leaves as
    // they were; valid until the next step. Absent if the batch has no sampling parameters or no rows. Every rank draws
    // the same.
    Tensor sample(const Batch& batch, const Tensor& logits);

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
    // out: [num_rows, vocab_size], or the rank's part of it
    void lm_head(const TensorView& x, const NormPrologue& norm, const TensorView& out);
    // With several ranks: the rank's part, [num_rows, part]. Columns beyond the vocabulary are not written.
    TensorView own_part(const TensorView& x, const NormPrologue& norm);
    // [num_rows, >= vocab_size] float32. On a CPU logits that are returned get memory of their own; a GPU copies them.
    Tensor buffer(int64_t num_rows, bool returned);
    void gather(const TensorView& own, const TensorView& out);  // out: [num_rows, >= vocab_size]
    // logits: [num_rows, n], of token ids from first_id on; undo: after the change, they become what they were
    void change(const Batch& batch, const TensorView& logits, int64_t first_id, bool undo = false);
    bool candidates_decide(const Batch& batch) const;
    Candidates gather_candidates(const Batch& batch);

    const ModelSpec& spec_;
    const LinearWeights& lm_head_;
    Backend& backend_;
    Communicator& communicator_;
    const Range vocab_;  // whose rows of lm_head are here
    const Rows rows_plan_;
    const Ids ids_plan_;
    const Parts parts_plan_;
    Buffers rows_, ids_, parts_;
};

}  // namespace infinilm
