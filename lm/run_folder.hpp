// SPDX-License-Identifier: Apache-2.0
// A run leaves this for people: loss.csv, expert_load.csv, curve.gp and curve.svg, sample.txt.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include "lm/checkpoint.hpp"
#include "lm/files.hpp"
#include "lm/training_state.hpp"

namespace tessera::lm {

inline constexpr char const* kLossFile = "loss.csv";
inline constexpr char const* kExpertLoadFile = "expert_load.csv";
inline constexpr char const* kPlotScript = "curve.gp";
inline constexpr char const* kPlotFile = "curve.svg";
inline constexpr char const* kSampleFile = "sample.txt";

/// All that a run writes.
inline constexpr char const* kRunFiles[] = {kModelFile,      kConfigFile, kStateFile, kLossFile,
                                            kExpertLoadFile, kPlotScript, kPlotFile,  kSampleFile};

struct PreparedFolder {
  FolderLock lock;             ///< of the folder, for as long as the run writes there
  std::filesystem::path kept;  ///< what an earlier run in the folder is called now, or empty
};

/// Creates `folder`. A run or another checkpoint that is there already moves to the first free name folder-1,
/// folder-2, ... Throws InputError, also where another run is writing: then nothing has moved.
PreparedFolder prepare_folder(std::filesystem::path const& folder);

/// Checkpoint, training state and both CSV files.
void save_run(std::filesystem::path const& folder, TrainingState const& state);

/// Columns: step, train and held-out bits per byte, learning rate, expert balance.
std::string loss_csv(TrainingState const& state);
/// Columns: layer, step, expert, load (1 = balanced). Layers are two blank lines apart, as gnuplot wants.
std::string expert_load_csv(TrainingState const& state);

/// The gnuplot script that draws both files, with the bigram's bits per byte as a line.
std::string plot_script(TrainingState const& state, double bigram);

/// Writes the script and runs gnuplot in `folder`. Returns "", or why there is no plot.
std::string draw_curve(std::filesystem::path const& folder, TrainingState const& state,
                       double bigram);

}  // namespace tessera::lm
