// The call for the low-rank changes of adapters.
#include "low_rank.h"

#include "dispatch.h"

namespace {

void run(const mm::LowRank& args) {
    by_dtype(args.dtype, [&](auto of) { mm::low_rank<typename decltype(of)::Type>(args); });
}

}  // namespace

MM_EACH_LOW_RANK_CALL(MM_DEFINE)
