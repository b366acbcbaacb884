"""The charts of the report."""

from __future__ import annotations

CHARTS: dict[str, dict[str, list[str]]] = {
    "Learning": {
        "Reward": ["reward/mean"],
        "Rows of the dataset": ["prompts/learning", "prompts/solved", "prompts/hopeless", "prompts/unseen"],
        "Entropy (nats)": ["learner/entropy"],
        "Policy loss": ["learner/policy_loss"],
        "Gradient norm": ["learner/grad_norm"],
        "Advantages of trained tokens": ["batch/advantage_mean", "batch/advantage_std"],
        "Learning rate": ["learner/lr"],
        "Tokens of a completion": ["completion/tokens", "batch/completion_tokens_max"],
        "Fraction of completions truncated": ["completion/truncated_fraction"],
        "Fraction of groups with a training signal": ["reward/signal_fraction"],
        "Critic: explained variance of the returns": ["critic/explained_variance"],
        "Divergence from the reference policy (nats)": ["kl/reference"],
    },
    "Speed": {
        "Trained tokens per second": ["tokens_per_s"],
        "Goodput and its factors (since the start)": [
            "goodput/total",
            "goodput/engine",
            "goodput/admitted",
            "goodput/signal",
            "goodput/trained",
        ],
        "Seconds of a step": ["learner/step_s", "learner/wait_s", "learner/sync_s", "learner/write_s"],
        "Phases of a step (seconds)": [
            "learner/forward_s",
            "learner/backward_s",
            "learner/optimizer_s",
            "learner/advantage_s",
            "learner/proximal_s",
            "learner/reference_s",
            "learner/values_s",
            "learner/critic_s",
        ],
        "Phases of the generators (fraction of their time since the start)": [
            "generator/engine_fraction",
            "generator/requests_fraction",
            "generator/rewards_fraction",
            "generator/messages_fraction",
            "generator/idle_fraction",
            "generator/environments_fraction",
        ],
        "Fraction of the learner devices' peak (MFU)": ["learner/mfu"],
        "Tokens per second and device": [
            "throughput/trained_tokens_per_s_per_device",
            "throughput/generated_tokens_per_s_per_device",
        ],
        "Peak memory of a process (bytes)": [
            "learner/peak_memory_bytes",
            "generator/peak_memory_bytes",
            "critic/peak_memory_bytes",
            "reward_model/peak_memory_bytes",
            "replay/peak_memory_bytes",
        ],
        "Seconds of a group in each state": ["group/generate_s", "group/queue_s", "group/train_s"],
    },
    "Environment": {
        "Turns of an episode": ["environment/turns"],
        "Tokens that the environment says in an episode": ["environment/observation_tokens"],
        "Seconds for which an episode waits": [
            "environment/wait_s/p50",
            "environment/wait_s/p95",
            "environment/reset_s",
        ],
        "Ends of episodes (fraction)": [
            "environment/ended_done",
            "environment/ended_max_turns",
            "environment/ended_window",
        ],
        "Failed episodes (fraction)": [
            "environment/failed/environment",
            "environment/failed/timeout",
            "environment/failed/overlong",
            "environment/failed/host",
        ],
        "Episodes in progress": ["environment/live_episodes", "environment/waiting_episodes"],
    },
    "Off-policy": {
        "Staleness of trained tokens (learner steps)": ["staleness/mean", "staleness/max", "replay/staleness_limit"],
        "Staleness gained in flight and in the queue": ["staleness/in_flight", "staleness/in_queue"],
        "Effective sample size of the importance weights": ["correction/ess", "correction/ess_capped"],
        "Distance of current and behavior policy (nats)": ["correction/behavior_kl", "correction/mismatch_kl"],
        "Fraction of tokens clipped, capped": ["learner/clip_fraction", "correction/capped_fraction"],
        "Active alarms of a collapse": ["collapse/alarms"],
    },
}
"""Section -> chart title -> metrics drawn in it. A chart is left out when the run has none of its metrics."""
