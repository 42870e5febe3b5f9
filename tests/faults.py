"""What a run survives: every fault, what is expected, and the tests that show it. `conftest.py` prints it."""

from dataclasses import dataclass

LAUNCH, TRAINING, DATA = "tests/launch/", "tests/kvm_dist/", "tests/kvm_dist/data/"
PARALLEL = "tests/parallel/"


@dataclass(frozen=True)
class Row:
    """tests: PATH::NAME without parameters; all of them, with all parameters, show what is expected."""

    fault: str
    expected: str
    tests: tuple[str, ...]


def row(fault: str, expected: str, folder: str, *tests: str) -> Row:
    """`tests` may name another folder in full."""
    return Row(fault, expected, tuple(test if test.startswith("tests/") else folder + test for test in tests))


ROWS = (
    row(
        "SIGKILL of rank 0, of rank 1, of the launcher, mid-step",
        "all down, exit 70, rank and signal named; resumes to the same bits; one MLflow run",
        LAUNCH,
        "test_resume.py::test_a_killed_run_goes_on_to_the_same_bits",
        "test_resume.py::test_a_killed_and_resumed_run_is_one_run_in_mlflow",
        "test_local.py::test_a_killed_rank_takes_the_others_with_it_and_is_named",
        "test_faults.py::test_a_rank_that_dies_in_its_backward_ends_the_run_in_seconds",
    ),
    row(
        "SIGKILL at 20 random instants of a save; just before the manifest",
        "20 of 20 leave a complete checkpoint; partial folders never count and go with the next good save",
        TRAINING,
        "test_checkpoint_faults.py::test_a_save_killed_at_any_instant_leaves_a_complete_checkpoint",
        "test_checkpoint_faults.py::test_killed_saves_stop_at_the_rename_too",
        "test_checkpoint.py::test_retention_keeps_the_newest_good_ones",
    ),
    row(
        "a checkpoint's file truncated, a bit flipped, a file deleted",
        "found before a tensor is applied, file named, all ranks fall back; 74 if none is valid",
        TRAINING,
        "test_checkpoint.py::test_damage_to_any_file_is_found_and_the_file_is_named",
        "test_checkpoint.py::test_the_newest_valid_checkpoint_wins_and_the_log_says_why",
        LAUNCH + "test_resume.py::test_a_damaged_checkpoint_is_passed_over_and_only_damaged_ones_end_the_run",
    ),
    row(
        "disk full during a save",
        "training goes on, own partial removed, need and have named; 74 only for the last save",
        TRAINING,
        "test_checkpoint_faults.py::test_a_full_disk_costs_the_new_save_only",
        "test_checkpoint_faults.py::test_too_little_space_is_refused_before_anything_is_written",
        "test_checkpoint_saver.py::test_a_failure_beside_the_steps_is_told_and_only_the_last_save_must_succeed",
    ),
    row(
        "SIGTERM to the launcher, USR2 to one rank",
        "one step saved by all ranks, exit 75, nothing lost",
        LAUNCH,
        "test_resume.py::test_a_stop_request_loses_no_step",
        "test_local.py::test_a_request_to_stop_reaches_every_rank_and_the_save_is_waited_for",
    ),
    row(
        "USR2 to two ranks one step apart; SIGTERM to one rank",
        "one step saved by all ranks, exit 75, nothing lost",
        LAUNCH,
        "test_faults.py::test_signals_to_ranks_one_step_apart_save_one_step",
    ),
    row(
        "a second signal during the save",
        "the save ends, exit 75",
        LAUNCH,
        "test_live.py::test_a_second_signal_while_the_ranks_save_changes_nothing",
    ),
    row(
        "Slurm: USR2 to the job, a rank killed, a node lost, the MLflow server away, in one run on two nodes",
        "saved where possible, queued again each time; same bits, one run, no gaps, no doubles",
        LAUNCH,
        "test_slurm_training.py::test_a_run_on_two_nodes_comes_through_everything_at_once",
    ),
    row(
        "Slurm: time limit",
        "saved before it, queued again by itself, restart count 1, finishes with the same bits",
        LAUNCH,
        "test_slurm_training.py::test_a_time_limit_costs_no_step",
    ),
    row(
        "Slurm: preemption by a partition of higher priority",
        "saved, queued again, restart count 1, finishes",
        LAUNCH,
        "test_slurm_job.py::test_a_job_that_makes_room_for_another_comes_back",
    ),
    row(
        "Slurm: node lost (slurmd and all its processes killed)",
        "queued again, restart count 1, finishes",
        LAUNCH,
        "test_slurm_job.py::test_a_job_whose_node_is_lost_comes_back",
    ),
    row(
        "SIGSTOP of a rank",
        "exit 71 in time, stacks of the others, silent rank, step and phase named",
        LAUNCH,
        "test_hang.py::test_a_stopped_rank_is_named_with_its_step_and_phase",
    ),
    row(
        "endless loop in the data; a rank that holds the interpreter",
        "exit 71 in time, stacks of all ranks, silent rank and phase named",
        LAUNCH,
        "test_hang.py::test_a_rank_that_loops_in_its_data_is_named",
        "test_hang.py::test_a_rank_that_holds_the_interpreter_is_noticed_by_the_launcher",
    ),
    row(
        "collective never answered",
        "exit 71 in time, stacks of all ranks, silent rank and phase named",
        LAUNCH,
        "test_faults.py::test_a_rank_that_never_answers_is_named",
        TRAINING + "test_hang.py::test_a_collective_that_is_not_answered_is_a_hang",
    ),
    row(
        "NaN on one rank",
        "all ranks stop before the optimizer step, 76, no checkpoint with it",
        LAUNCH,
        "test_faults.py::test_a_loss_that_is_no_number_on_one_rank_ends_all",
        "test_resume.py::test_a_loss_that_is_not_finite_stops_all_ranks_with_nothing_lost",
        PARALLEL + "test_engine.py::test_a_gradient_that_is_not_finite_on_one_rank_changes_nothing_on_any",
    ),
    row(
        "NaN or loss spike, policy skip",
        "the batch is left out, counted, bounded over all attempts",
        TRAINING,
        "test_trainer.py::test_skipping_costs_the_batch_and_is_counted_and_saved_at_once",
        "test_trainer.py::test_skips_are_bounded_over_all_attempts",
    ),
    row(
        "loss spike, policy rollback",
        "not applied; back to the last checkpoint and on behind the batch; a resume ends with the same bits",
        LAUNCH,
        "test_faults.py::test_a_spike_sends_the_run_back_and_a_resume_from_there_has_the_same_bits",
    ),
    row(
        "MLflow down at start, killed, asking for a login",
        "every (metric, step) exactly once after recovery",
        TRAINING,
        "test_tracking_mlflow.py::test_a_server_that_comes_late_gets_everything_once",
        "test_tracking_mlflow.py::"
        "test_a_server_that_asks_for_a_login_and_is_killed_in_between_has_everything_once",
        "test_tracking_forwarder.py::test_an_outage_loses_and_doubles_nothing",
    ),
    row(
        "MLflow answering 500, hanging",
        "steps go on; a bounded wait at the end",
        TRAINING,
        "test_tracking_mlflow.py::test_a_server_that_does_not_work_costs_a_bounded_wait_at_the_end",
    ),
    row(
        "trainer killed, tracking process killed",
        "no run left RUNNING, the same run after a resume",
        TRAINING,
        "test_tracking_mlflow.py::test_a_killed_trainer_leaves_no_running_run_and_a_resume_reuses_it",
        "test_tracking_mlflow.py::test_a_killed_tracking_process_is_back_at_the_next_checkpoint",
    ),
    row(
        "tracking process that busy neighbours leave no processor, at the end",
        "another sends the rest in front, everything once; none is ended while it makes a database's tables",
        TRAINING,
        "test_tracking_mlflow.py::test_a_process_that_gets_no_processor_is_replaced_at_the_end",
        "test_tracking_mlflow.py::test_a_process_that_makes_the_tables_is_let_finish",
    ),
    row(
        "MLflow, steps taken again after a rollback",
        "their new values beside the ones before, once; the latest value and the best checkpoint are the new",
        TRAINING,
        "test_tracking_forwarder.py::test_steps_taken_again_after_a_rollback_bring_their_new_values_once",
        "test_tracking_forwarder.py::test_a_checkpoint_saved_again_after_a_rollback_is_judged_by_its_new_value",
        "test_tracking_mlflow.py::test_a_rollback_is_told_from_a_resume_by_what_the_database_holds",
    ),
    row(
        "shard truncated, header overwritten, member missing",
        "65 naming shard and sample, or a counted skip under a limit, the same after a resume",
        DATA,
        "test_damage.py::test_damage_is_reported_with_the_shard_and_the_first_bad_sample",
        "test_damage.py::test_an_allowed_damaged_shard_is_masked_and_every_other_token_keeps_its_place",
        "test_damage.py::test_counts_survive_a_resume_and_the_limit_holds_across_it",
        LAUNCH + "test_resume.py::test_a_damaged_shard_ends_the_run_and_is_named",
    ),
    row(
        "world 2 -> 1 -> 2 -> 4, ZeRO stage changed, sequence degree changed",
        "same global batches, first loss within 1e-6 relative",
        LAUNCH,
        "test_resume.py::test_another_layout_goes_on_with_the_same_loss",
        DATA + "test_loader.py::test_a_change_of_layout_at_a_resume_leaves_no_gap_and_repeats_nothing",
        PARALLEL + "test_engine.py::test_a_checkpoint_restores_its_bytes_at_every_other_layout",
    ),
    row(
        "another number of CPU threads at a resume",
        "taken, and said that the bits will differ",
        TRAINING,
        "test_layout_record.py::test_another_number_of_threads_at_a_resume_is_said",
    ),
    row(
        "config edited under an existing run",
        "refused with a diff",
        TRAINING,
        "test_run_directory.py::test_an_edit_that_changes_the_result_is_refused_with_a_diff",
    ),
    row(
        "two launches of one run directory",
        "the lock names host and pid",
        TRAINING,
        "test_run_directory.py::test_a_second_launch_is_refused_and_named",
        LAUNCH + "test_local.py::test_a_second_launch_of_a_live_run_is_refused",
    ),
    row(
        "crash loop",
        "93 after three tries without a new checkpoint",
        LAUNCH,
        "test_stop.py::test_three_local_starts_without_a_checkpoint_are_enough",
        TRAINING + "test_attempts.py::test_three_bad_ends_without_a_new_checkpoint_are_a_crash_loop",
    ),
    row(
        "Slurm: crash loop",
        "93, and the job stays ended",
        LAUNCH,
        "test_slurm_job.py::test_a_crash_loop_ends_by_itself",
    ),
    row(
        "port taken, wrong MASTER_ADDR, a rank missing",
        "in time, naming variable and peer",
        PARALLEL,
        "test_world.py::test_a_missing_peer_is_named",
        "test_world.py::test_a_missing_first_rank_is_named_with_its_address",
        "test_world.py::test_a_taken_port_is_named",
        "test_world.py::test_an_address_that_does_not_resolve_is_named",
        "test_world.py::test_an_address_of_another_machine_is_named_by_rank_0",
    ),
    row(
        "read-only or missing run directory; tokenizer and data mismatch",
        "refused before the first step",
        LAUNCH,
        "test_cli.py::test_a_run_root_that_cannot_be_written_ends_with_74",
        TRAINING + "test_run_directory.py::test_a_run_directory_under_proc_is_a_storage_error",
        DATA + "test_index.py::test_data_of_another_tokenizer_is_refused_before_training",
        DATA + "test_index.py::test_a_vocabulary_too_large_for_the_model_is_refused",
    ),
)
