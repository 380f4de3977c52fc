// A second way around attention, as in Gemma 3n (LAuReL, Menghani et al., arXiv:2411.07501): the normed rows that
// attention reads, and two linears of them with few elements between, whose result is normed. Both join the residual
// stream, which is then divided by the root of 2.
#pragma once

#include "model/step.h"
#include "model/table.h"

namespace infinilm {

namespace sites {
inline constexpr Site laurel{"laurel"};  // [num_tokens, hidden_size]: what the second linear gives
}  // namespace sites

class Laurel {
public:
    static constexpr Site site = sites::laurel;  // of what it gives
    static constexpr bool is_whole = true;       // on every rank

    Laurel(const ModelSpec& model, const LaurelSpec& spec, BufferPlan& plan);
    void declare(ParamTable& table);
    std::vector<Site> sites() const { return {}; }  // besides that of what it gives
    std::vector<LinearCall> calls() const;

    // The first linear; and what it reads joins the residual stream, which attention reads no more.
    template <class Tap>
    void begin(const Step<Tap>& s, const Input& in) const;
    template <class Tap>
    void finish(const Step<Tap>& s, const TensorView& residual, const TensorView& out) const;

private:
    int64_t hidden_size_, rank_;
    Buffer inner_;         // [num_tokens, rank]
    LinearWeights left_;   // [rank, hidden_size]
    LinearWeights right_;  // [hidden_size, rank]
};

}  // namespace infinilm
