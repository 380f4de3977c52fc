// What a test can ask the fake NCCL beyond NCCL's own functions.
#pragma once

extern "C" {
// From now on `function` fails on this rank (-1: on any) with this ncclResult_t; 0: no more. "async" is what
// ncclCommGetAsyncError tells of the rank.
void fake_nccl_fail(const char* function, int rank, int result);
// What was called since the last look, a line each: "<rank> <function> <arguments>", without ncclCommGetAsyncError.
const char* fake_nccl_log();
int fake_nccl_live_comms();
int fake_nccl_violations();  // calls for a communicator while another one was in a call for it
}
