// The calls of mixtures of experts.
#include <cstdint>

#include "experts.h"
#include "router.h"
#include "../layers/dispatch.h"

namespace {

void run(const mm::Route& args) {
    by_dtype(args.dtype, [&](auto of) {
        by_dtype(args.out_dtype, [&](auto out) {
            mm::route(args, of.in(args.logits), out.in(args.factors), out.out(args.weights));
        });
    });
}

void run(const mm::RunExperts& args) {
    by_dtype(args.dtype, [&](auto of) { mm::run_experts<typename decltype(of)::Type>(args); });
}

}  // namespace

MM_EACH_EXPERT_CALL(MM_DEFINE)
