"""Which tokens a step computes: the scheduler, the blocks of the KV cache, states of sequences, and masks."""
