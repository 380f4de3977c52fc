// What a test can ask the fake NCCL beyond NCCL's own functions.
#pragma once

extern "C" {
// From now on `function` fails on this rank (-1: on any) with this ncclResult_t; 0: no more. "async" is what
// ncclCommGetAsyncError tells of the rank.
void fake_nccl_fail(const char* function, int rank, int result);
// What was called since the last look, a line each: "<rank> <function> <arguments>", without ncclCommGetAsyncError.
const char* fake_nccl_log();
// From now on the thread of a call takes so long until it adds its work to the stream.
void fake_nccl_linger(int milliseconds);
int fake_nccl_live_comms();
int fake_nccl_violations();  // of NCCL's rules, such as two calls for a communicator at a time
}
