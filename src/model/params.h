// The weights of a rank: takes the tensors of a checkpoint, as the table says, and prepares them for the backend.
#pragma once

#include <atomic>
#include <deque>
#include <string>
#include <vector>

#include "model/model.h"
#include "model/table.h"

namespace infinilm {

class Params {
public:
    // The weights of one rank. The table has all rows, also those of other stages. ConfigError: see local_spec.
    explicit Params(const ModelSpec& model, Shard shard = {});
    Params(const Params&) = delete;  // rows point into the model
    Params& operator=(const Params&) = delete;

    const std::vector<ParamRow>& rows() const { return table_.rows(); }
    const std::deque<LinearEntry>& linears() const { return table_.linears(); }
    const ModelSpec& spec() const { return model_.spec; }  // of the rank
    bool loaded(const ParamRow& row) const { return loaded_[index(row)]; }
    // Takes the rank's part of the whole tensor (only kv heads that are not neighbours are copied). A linear is
    // prepared as soon as its last tensor is there. A read-only tensor, such as one in a mapped file, is kept for
    // state_dict; another one is let go of then. Packed tensors of a linear take the place of its weights, and their
    // memory is used where it can be. Returns the names of the tensors that were prepared and that nothing reads again.
    // blocks: what a weight of a linear is stored in; a tensor of them is let go of in any case.
    // WeightError: unknown, repeated, misshapen.
    std::vector<std::string> load(Backend& backend, const std::string& name, const Tensor& tensor,
                                  const Blocks& blocks = {});
    // Other values of parameters that are loaded: whole tensors, as load() takes them. What is not named of a linear
    // stays as it is. WeightError, before anything changes: unknown, named twice, misshapen; or a part of a linear in
    // few bits, whose other parts are not kept as they were.
    using NamedTensors = std::vector<std::pair<std::string, Tensor>>;
    void check_update(const NamedTensors& tensors) const;
    // Takes what check_update has let through. prepare() is due behind it.
    void update(Backend& backend, const NamedTensors& tensors);
    // What divides all places where ranks cut the inputs of a linear; 0: all have the whole.
    int64_t column_unit(const LinearEntry& linear) const;
    // The packed linears that are there, as tensors by name; they count as not loaded then.
    std::vector<std::pair<std::string, Tensor>> take_packed();
    void load_dummy(Backend& backend, DType dtype, uint64_t seed);                     // random parts, for benchmarks
    const ParamRow* find(const std::string& name) const { return table_.find(name); }  // null: there is none
    // The rank's part of a tensor that has the row's rows, or its columns where these are divided.
    Tensor part(const ParamRow& row, const Tensor& tensor, const Blocks& blocks = {}) const;
    bool has_part(const ParamRow& row) const { return !ranges(row).empty(); }
    Range outputs(const ParamRow& row) const;  // of the rank's outputs of its linear, those of this weight
    // For a linear by_head: which of the model's heads the rank has.
    Range heads(const ParamRow& row) const {
        const Range rows = ranges(row)[0];
        return {rows.begin / row.linear->head_dim, rows.end / row.linear->head_dim};
    }
    bool is_of_stage(const ParamRow& row) const;  // else no rank of this stage has a part
    // Names that load() takes and the stage needs: of parameters, and of the packed tensors of linears.
    std::vector<std::string> names_of_stage() const;
    void skip_other_stages(Backend& backend);  // what load() gets for others counts as loaded from now on
    std::vector<std::string> missing() const;  // names not loaded yet, in checkpoint order
    void check_complete() const;               // WeightError: names what is missing
    // The rank's part of a tensor as it was loaded, or what is left of it: see Backend::unpack_linear. Absent: none.
    Tensor stored(Backend& backend, const ParamRow& row) const;
    // Once nothing is missing: what is left to do. WeightError: see check_complete.
    void prepare(Backend& backend);
    bool prepared() const { return prepared_; }
    const Model& model() const { return model_; }
    int64_t bytes() const { return bytes_; }  // of the loaded parts
    // Bytes that the rank's weights take once they are prepared, where tensors are stored as dtype.
    int64_t prepared_bytes(DType dtype) const;
    int64_t prepared_bytes(const ParamRow& row, DType dtype) const;
    void clear();  // lets go of every tensor

private:
    // A linear while its tensors arrive.
    struct Loading {
        std::vector<LinearPart> parts;  // those whose memory is a file's, or not prepared yet
        PackedTensors packed;           // of the whole linear, in place of weights, until it is adopted
    };
    size_t index(const ParamRow& row) const { return static_cast<size_t>(&row - rows().data()); }
    Loading& loading(const LinearEntry& linear) { return loading_[linear.index]; }
    const Loading& loading(const LinearEntry& linear) const { return loading_[linear.index]; }
    // The rank's part; absent once prepared, unless it is a file's.
    Tensor& destination(const ParamRow& row);
    const Tensor& destination(const ParamRow& row) const { return const_cast<Params*>(this)->destination(row); }
    // The rows, or columns, of the tensor that the rank has: see Cut. Empty: it has none.
    std::vector<Range> ranges(const ParamRow& row) const;
    // The same for any rank of the stage that has the row.
    std::vector<Range> ranges(const ParamRow& row, Shard shard) const;
    std::vector<int64_t> part_shape(const ParamRow& row) const;
    void check(const ParamRow& row, const Tensor& tensor, const Blocks& blocks) const;
    void check_form(const ParamRow& row, const Tensor& tensor, const Blocks& blocks) const;
    const ParamRow& known(const std::string& name) const;  // WeightError: there is none
    std::vector<std::string> keep(Backend& backend, const ParamRow& row, Tensor part);
    std::vector<std::string> prepare_if_complete(Backend& backend, const LinearEntry& linear);
    std::vector<std::string> keep_packed(Backend& backend, const LinearEntry& linear, bool scales,
                                         const Tensor& tensor);
    std::vector<std::string> adopt_if_complete(Backend& backend, const LinearEntry& linear);
    PackedSource packed_source(const LinearEntry& linear, Shard shard) const;

    const ModelSpec whole_;
    const Shard shard_;
    Model model_;
    ParamTable table_;
    std::vector<bool> loaded_;        // [rows]
    std::vector<Loading> loading_;    // [linears]
    std::atomic<int64_t> bytes_ = 0;  // also read while another thread loads
    bool prepared_ = false;
};

}  // namespace infinilm
