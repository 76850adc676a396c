"""Room 3, computes: a StepPlan in, sampled token ids out."""
