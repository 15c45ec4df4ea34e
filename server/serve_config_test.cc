#include "server/serve_config.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/file.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <system_error>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "loader/hwr/store.h"
#include "models/host_weight_identity.h"
#include "nlohmann/json.hpp"

namespace dlo {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

const std::filesystem::path kShapes = std::filesystem::path(DLO_SOURCE_DIR) / "assets/shapes";
const std::string kShapesConfig = DLO_SOURCE_DIR "/configs/shapes.yaml";

class Folder {
 public:
  Folder() {
    std::string folder = (std::filesystem::temp_directory_path() / "serve-XXXXXX").string();
    path_ = mkdtemp(folder.data());
  }
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  std::string Write(const std::string& name, const std::string& text) const {
    std::ofstream(path_ / name, std::ios::binary) << text;
    return path_ / name;
  }

 private:
  std::filesystem::path path_;
};

absl::StatusOr<ServeCommand> Parse(std::vector<std::string> arguments,
                                   const std::map<std::string, std::string>& environment = {},
                                   const InstallLayout& layout = {"/nowhere/bin", DLO_SOURCE_DIR}) {
  arguments.insert(arguments.begin(), "dlo-serve");
  std::vector<const char*> argv;
  argv.reserve(arguments.size());
  for (const std::string& argument : arguments) argv.push_back(argument.c_str());
  return ParseServeCommand(static_cast<int>(argv.size()), argv.data(), environment, layout);
}

TEST(ServeConfigTest, WithoutArgumentsTheDemoModelIsServed) {
  const absl::StatusOr<ServeCommand> command = Parse({});
  ASSERT_TRUE(command.ok()) << command.status();
  EXPECT_EQ(command->action, ServeCommand::Action::kServe);
  EXPECT_EQ(command->config.model.path, kShapes);
  EXPECT_EQ(command->config.model.dtype, DType::kF32);
  EXPECT_EQ(command->config.device, "cpu");
  EXPECT_EQ(command->config.listen, "127.0.0.1:50051");
  EXPECT_EQ(command->config.metrics_listen, "");
  EXPECT_EQ(command->config.queue_max_waiting, 64);
  EXPECT_EQ(command->config.shutdown_grace, absl::Minutes(5));
  EXPECT_EQ(command->config.parallel.dp, 1);
  EXPECT_EQ(command->config.offload.slots, 2);
  EXPECT_TRUE(command->config.data_dir.is_absolute());
  EXPECT_EQ(command->config.jobs_result_ttl, absl::Hours(24));
  EXPECT_EQ(command->config.jobs_result_bytes_max, int64_t{10} << 30);
}

TEST(ServeConfigTest, JobsAreKeptInTheXdgStateFolder) {
  EXPECT_EQ(Parse({}, {{"XDG_STATE_HOME", "/state"}})->config.data_dir, "/state/dlo");
  // The specification has a relative one passed over.
  for (const std::map<std::string, std::string>& environment :
       {std::map<std::string, std::string>{}, {{"XDG_STATE_HOME", "state"}}}) {
    EXPECT_THAT(Parse({}, environment)->config.data_dir.string(),
                ::testing::EndsWith(".local/state/dlo"));
  }
}

TEST(ServeConfigTest, WithoutAHomeADataFolderMustBeConfigured) {
  const std::string home = getenv("HOME") == nullptr ? "" : getenv("HOME");
  unsetenv("HOME");
  const absl::Status status = Parse({}).status();
  const bool with_flag = Parse({"--data-dir", "/d"}).ok();
  if (!home.empty()) setenv("HOME", home.c_str(), 1);
  EXPECT_THAT(status.message(), AllOf(HasSubstr("HOME is not set"), HasSubstr("--data-dir")));
  EXPECT_TRUE(with_flag);
}

TEST(ServeConfigTest, ResultsNeedRoom) {
  const absl::Status status = Parse({"--result-bytes-max", "0"}).status();
  EXPECT_THAT(status.message(), HasSubstr("jobs.result_bytes_max is 0"));
}

TEST(ServeConfigTest, AnInstalledTreeBringsItsOwnDemoModel) {
  const Folder prefix;
  std::filesystem::create_directories(prefix.path() / "share/dlo/shapes");
  std::filesystem::create_directories(prefix.path() / "bin");
  prefix.Write("share/dlo/shapes/model_index.json", "{}");
  const InstallLayout layout = {prefix.path() / "bin", DLO_SOURCE_DIR};
  EXPECT_EQ(Parse({}, {}, layout)->config.model.path, prefix.path() / "share/dlo/shapes");
}

TEST(ServeConfigTest, WithoutAnyDemoModelOneMustBeConfigured) {
  const InstallLayout layout = {"/nowhere/bin", "/nowhere/source"};
  const absl::Status status = Parse({}, {}, layout).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(status.message(),
              AllOf(HasSubstr("/nowhere/share/dlo/shapes"),
                    HasSubstr("/nowhere/source/assets/shapes"), HasSubstr("--model")));
  EXPECT_EQ(Parse({"--model", "org/name"}, {}, layout)->config.model.path, "org/name");
  EXPECT_TRUE(Parse({"--help"}, {}, layout).ok());
}

TEST(ServeConfigTest, TheShapesConfigServesTheDemoModel) {
  const absl::StatusOr<ServeCommand> command = Parse({"--config", kShapesConfig});
  ASSERT_TRUE(command.ok()) << command.status();
  EXPECT_EQ(command->config.model.path, kShapes);
  EXPECT_EQ(command->config.model.dtype, DType::kF32);
}

TEST(ServeConfigTest, FlagBeatsEnvironmentBeatsFile) {
  const Folder folder;
  const std::string file = folder.Write(
      "c.yaml", "listen: 127.0.0.1:1\nqueue: {max_waiting: 1}\nshutdown: {grace: 1s}\n");
  const absl::StatusOr<ServeCommand> command =
      Parse({"serve", "--config", file, "--listen", "127.0.0.1:3"},
            {{"DLO_LISTEN", "127.0.0.1:2"}, {"DLO_QUEUE_MAX_WAITING", "2"}});
  ASSERT_TRUE(command.ok()) << command.status();
  EXPECT_EQ(command->config.listen, "127.0.0.1:3");
  EXPECT_EQ(command->config.queue_max_waiting, 2);
  EXPECT_EQ(command->config.shutdown_grace, absl::Seconds(1));
}

TEST(ServeConfigTest, TheConfigFileCanComeFromTheEnvironment) {
  const Folder folder;
  const std::string first = folder.Write("a.yaml", "listen: 127.0.0.1:1\n");
  const std::string second = folder.Write("b.yaml", "listen: 127.0.0.1:2\n");
  EXPECT_EQ(Parse({}, {{"DLO_CONFIG", first}})->config.listen, "127.0.0.1:1");
  EXPECT_EQ(Parse({"--config", second}, {{"DLO_CONFIG", first}})->config.listen, "127.0.0.1:2");
  EXPECT_EQ(Parse({"--config", "/nowhere.yaml"}).status().code(), absl::StatusCode::kNotFound);
}

TEST(ServeConfigTest, EveryKeyHasAFlag) {
  const absl::StatusOr<ServeCommand> command = Parse({"check",
                                                      "--model",
                                                      "org/name",
                                                      "--dtype",
                                                      "bfloat16",
                                                      "--quantization",
                                                      "fp8",
                                                      "--device",
                                                      "cuda",
                                                      "--listen",
                                                      "unix:/run/x.sock",
                                                      "--metrics-listen",
                                                      "0.0.0.0:9464",
                                                      "--data-dir",
                                                      "/d",
                                                      "--dp",
                                                      "4",
                                                      "--sp",
                                                      "1",
                                                      "--tp",
                                                      "1",
                                                      "--cfg",
                                                      "1",
                                                      "--transfer",
                                                      "none",
                                                      "--resident-layers",
                                                      "0",
                                                      "--slots",
                                                      "2",
                                                      "--device-memory-limit",
                                                      "0",
                                                      "--host-memory-limit",
                                                      "0",
                                                      "--checkpoint-mmap",
                                                      "off",
                                                      "--host-weights-mode",
                                                      "required",
                                                      "--host-weights-root",
                                                      "/w",
                                                      "--host-weights-validation",
                                                      "full",
                                                      "--host-weights-max-store-bytes",
                                                      "100GiB",
                                                      "--host-weights-min-free-bytes",
                                                      "5GiB",
                                                      "--host-weights-wait",
                                                      "30s",
                                                      "--max-waiting",
                                                      "7",
                                                      "--result-ttl",
                                                      "2h",
                                                      "--result-bytes-max",
                                                      "3GiB",
                                                      "--shutdown-grace",
                                                      "90s",
                                                      "--wave-max-wait",
                                                      "250ms",
                                                      "--wave-compatibility",
                                                      "schedule",
                                                      "--wave-stall-timeout",
                                                      "1h",
                                                      "--wave-stuck-factor",
                                                      "0",
                                                      "--wave-stuck-floor",
                                                      "90s",
                                                      "--threads=3",
                                                      "--remote-ranks=2",
                                                      "--worker-listen=10.0.0.1:7070",
                                                      "--worker-tls-ca=/tls/ca.pem",
                                                      "--worker-tls-cert=/tls/cert.pem",
                                                      "--worker-tls-key=/tls/key.pem",
                                                      "--log-level",
                                                      "debug"});
  ASSERT_TRUE(command.ok()) << command.status();
  EXPECT_EQ(command->action, ServeCommand::Action::kCheck);
  EXPECT_EQ(command->config.model.path, "org/name");
  EXPECT_EQ(command->config.model.dtype, DType::kBF16);
  EXPECT_EQ(command->config.model.quantization, OnlineQuantization::kPerTensorFp8);
  EXPECT_EQ(command->config.device, "cuda");
  EXPECT_EQ(command->config.listen, "unix:/run/x.sock");
  EXPECT_EQ(command->config.metrics_listen, "0.0.0.0:9464");
  EXPECT_EQ(command->config.data_dir, "/d");
  EXPECT_EQ(command->config.parallel.dp, 4);
  EXPECT_EQ(command->config.host_weights.checkpoint_mmap, CheckpointMmap::kOff);
  EXPECT_EQ(command->config.host_weights.mode, hwr::Mode::kRequired);
  EXPECT_EQ(command->config.host_weights.root, "/w");
  EXPECT_EQ(command->config.host_weights.validation, hwr::Validation::kFull);
  EXPECT_EQ(command->config.host_weights.max_store_bytes, int64_t{100} << 30);
  EXPECT_EQ(command->config.host_weights.min_free_bytes, int64_t{5} << 30);
  EXPECT_EQ(command->config.host_weights.wait, absl::Seconds(30));
  EXPECT_EQ(command->config.queue_max_waiting, 7);
  EXPECT_EQ(command->config.jobs_result_ttl, absl::Hours(2));
  EXPECT_EQ(command->config.jobs_result_bytes_max, int64_t{3} << 30);
  EXPECT_EQ(command->config.shutdown_grace, absl::Seconds(90));
  EXPECT_EQ(command->config.wave.max_wait, absl::Milliseconds(250));
  EXPECT_EQ(command->config.wave.compatibility, WaveCompatibility::kSchedule);
  EXPECT_EQ(command->config.wave.stall_timeout, absl::Hours(1));
  EXPECT_EQ(command->config.wave.stuck_factor, 0);
  EXPECT_EQ(command->config.wave.stuck_floor, absl::Seconds(90));
  EXPECT_EQ(command->config.worker_threads, 3);
  EXPECT_EQ(command->config.remote.ranks, 2);
  EXPECT_EQ(command->config.remote.listen, "10.0.0.1:7070");
  EXPECT_EQ(command->config.remote.tls.ca, "/tls/ca.pem");
  EXPECT_EQ(command->config.remote.tls.cert, "/tls/cert.pem");
  EXPECT_EQ(command->config.remote.tls.key, "/tls/key.pem");
  EXPECT_EQ(command->config.log_level, "debug");
}

TEST(ServeConfigTest, AutoDtypeFollowsTheDevice) {
  EXPECT_EQ(Parse({"--device", "cuda"})->config.model.dtype, DType::kBF16);
  EXPECT_EQ(Parse({"--device", "cpu"})->config.model.dtype, DType::kF32);
  EXPECT_EQ(Parse({"--device", "cpu", "--dtype", "bfloat16"})->config.model.dtype, DType::kBF16);
  EXPECT_EQ(Parse({"--device", "cuda", "--dtype", "float32"})->config.model.dtype, DType::kF32);
}

TEST(ServeConfigTest, PrintConfigShowsValuesAndOriginsAndLoadsAgain) {
  const absl::StatusOr<ServeCommand> command =
      Parse({"--print-config", "--config", kShapesConfig, "--listen", "127.0.0.1:7"},
            {{"DLO_WORKER_THREADS", "2"}});
  ASSERT_TRUE(command.ok()) << command.status();
  EXPECT_EQ(command->action, ServeCommand::Action::kPrint);
  EXPECT_THAT(command->text, AllOf(HasSubstr("model:\n  path: " + kShapes.string() + "  # file " +
                                             kShapesConfig + ":"),
                                   HasSubstr("\nlisten: 127.0.0.1:7  # flag --listen\n"),
                                   HasSubstr("worker:\n  threads: 2  # env DLO_WORKER_THREADS\n"),
                                   HasSubstr("shutdown:\n  grace: 5m  # default\n"),
                                   HasSubstr("offload:\n  transfer: none  # default\n")));
  const Folder folder;
  const absl::StatusOr<ServeCommand> again =
      Parse({"--config", folder.Write("printed.yaml", command->text)});
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->config.listen, "127.0.0.1:7");
  EXPECT_EQ(again->config.model.path, kShapes);
}

TEST(ServeConfigTest, HelpAndVersionAreText) {
  const absl::StatusOr<ServeCommand> help = Parse({"--help"});
  ASSERT_TRUE(help.ok());
  EXPECT_EQ(help->action, ServeCommand::Action::kPrint);
  EXPECT_THAT(help->text,
              AllOf(HasSubstr("--config"), HasSubstr("DLO_PARALLEL_DP"), HasSubstr("check")));
  EXPECT_THAT(Parse({"--version"})->text, HasSubstr("dlo-serve "));
}

struct WrongArguments {
  std::vector<std::string> arguments;
  const char* says;
};

class ServeConfigRefusalTest : public ::testing::TestWithParam<WrongArguments> {};

TEST_P(ServeConfigRefusalTest, NamesTheWayOut) {
  const absl::Status status = Parse(GetParam().arguments).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_THAT(status.message(), HasSubstr(GetParam().says));
}

INSTANTIATE_TEST_SUITE_P(
    All, ServeConfigRefusalTest,
    ::testing::Values(
        WrongArguments{{"--sp", "2"},
                       "--sp 2: sequence parallelism is not available yet; set it to 1 "
                       "(parallel.sp from flag --sp)"},
        WrongArguments{{"--tp", "2"}, "--tp 2: tensor parallelism is not available yet"},
        WrongArguments{{"--cfg", "2"}, "--cfg 2: guidance parallelism is not available yet"},
        WrongArguments{{"--dp", "64", "--sp", "65"},
                       "--dp 64 x --tp 1 x --sp 65 x --cfg 1 asks for more than 4096 ranks"},
        WrongArguments{{"--cfg", "3"}, "from 1 to 2"},
        WrongArguments{{"--dp", "0"}, "--dp is \"0\", but must be a whole number from 1"},
        WrongArguments{{"--transfer", "rank-local", "--resident-layers", "auto"},
                       "there is no offload.device_memory_limit to fill"},
        WrongArguments{{"--resident-layers", "auto"},
                       "--resident-layers auto with --transfer none"},
        WrongArguments{{"--resident-layers", "some"}, "a whole number from 0 to"},
        WrongArguments{{"--transfer", "rank_local"}, "did you mean rank-local?"},
        WrongArguments{{"--resident-layers", "3"},
                       "--resident-layers 3 with --transfer none: without streaming all blocks are "
                       "on the device; use --resident-layers 0, or --transfer rank-local "
                       "(offload.resident_layers from flag --resident-layers)"},
        WrongArguments{{"--transfer", "allgather", "--resident-layers", "3"},
                       "--resident-layers 3 with --transfer allgather"},
        WrongArguments{{"--slots", "3"}, "there are no slots"},
        WrongArguments{{"--slots", "1"}, "from 2 to 64"},
        WrongArguments{{"--checkpoint-mmap", "yes"}, "must be one of auto, on, off"},
        WrongArguments{{"--checkpoint-mmap", "on"}, "nothing is streamed; set it to auto"},
        WrongArguments{{"--checkpoint-mmap", "on", "--transfer", "allgather", "--dp", "2"},
                       "shards in memory of its own; set it to auto"},
        WrongArguments{{"--host-weights-mode", "on"},
                       "must be one of disabled, preferred, required"},
        WrongArguments{{"--host-weights-mode", "preferred", "--transfer", "rank-local"},
                       "there is no store to look into; set host_weights.root"},
        WrongArguments{{"--host-weight-runtime-mode", "required"},
                       "(flag --host-weight-runtime-mode), but there is no store to look into"},
        WrongArguments{{"--host-weights-mode", "required", "--host-weights-root", "/w",
                        "--transfer", "rank-local", "--checkpoint-mmap", "on"},
                       "host_weights.mode is required, where weights come from artifacts or are "
                       "loaded to make them; set it to auto"},
        WrongArguments{{"--metrics-listen", "9464"},
                       "metrics_listen is \"9464\" (flag --metrics-listen), but must be HOST:PORT "
                       "such as 127.0.0.1:9464 or [::1]:9464; or empty for no metrics"},
        WrongArguments{{"--metrics-listen", "unix:/run/x"}, "metrics_listen is \"unix:/run/x\""},
        WrongArguments{{"--metrics-listen", "127.0.0.1:1,127.0.0.1:2"}, "must be HOST:PORT"},
        WrongArguments{{"--metrics-listen", "localhost:99999"}, "a port from 0 to 65535"},
        WrongArguments{{"--metrics-listen", "127.0.0.1:8s"}, "a port from 0 to 65535"},
        WrongArguments{{"--metrics-listen", "127.0.0.1:50051"}, "gRPC listens there (listen)"},
        WrongArguments{{"--dtype", "float16"}, "must be one of auto, float32, bfloat16"},
        WrongArguments{{"--quantization", "int8"}, "must be one of none, fp8"},
        WrongArguments{
            {"--quantization", "fp8", "--transfer", "rank-local", "--checkpoint-mmap", "on"},
            "model.quantization is fp8 (flag --quantization), but "
            "host_weights.checkpoint_mmap is on: the weights that run are not those of "
            "the checkpoint; set that to auto, or this to none"},
        WrongArguments{{"--quantization", "fp8", "--device", "cuda", "--dtype", "float32"},
                       "in bfloat16 only; set model.dtype to bfloat16, or this to none"},
        WrongArguments{{"--device", "tpu"}, "must be one of cpu, cuda"},
        WrongArguments{{"--model", ""}, "--model is \"\", but must be a path"},
        WrongArguments{{"--listen", ""}, "listen is \"\" (flag --listen)"},
        WrongArguments{{"--listen", "50051"}, "must be HOST:PORT"},
        WrongArguments{{"--listen", ":50051"}, "must be HOST:PORT"},
        WrongArguments{{"--listen", "::1:50051"}, "[::1]:50051"},
        WrongArguments{{"--listen", "host:"}, "a port from 0 to 65535"},
        WrongArguments{{"--listen", "host:65536"}, "a port from 0 to 65535"},
        WrongArguments{{"--listen", "host:http"}, "a port from 0 to 65535"},
        WrongArguments{{"--listen", "unix:run/x"}, "absolute path"},
        WrongArguments{{"--listen", "unix:/" + std::string(200, 'x')}, "at most 107 bytes"},
        WrongArguments{{"--wave-stall-timeout", "0s"}, "wave.stall_timeout is 0"},
        WrongArguments{{"--wave-stuck-floor", "1s"}, "wave.stuck_floor is 1s"},
        WrongArguments{{"--remote-ranks", "1"}, "worker.listen is empty"},
        WrongArguments{{"--remote-ranks", "1", "--worker-listen", "h:1"},
                       "worker.tls_ca is empty (default), but worker.remote_ranks is 1"},
        WrongArguments{{"--remote-ranks", "2"}, "there are only 1 ranks; lower it, or raise"},
        WrongArguments{{"--worker-listen", "h:1"},
                       "worker.remote_ranks is 0, so no worker attaches from another host"},
        WrongArguments{{"--worker-tls-key", "/k"}, "worker.tls_key is /k"},
        WrongArguments{
            {"--remote-ranks", "1", "--worker-listen", "unix:/x"},
            "worker.listen is \"unix:/x\" (flag --worker-listen), but must be HOST:PORT"},
        WrongArguments{{"--dp", "2", "--remote-ranks", "1", "--transfer", "allgather"},
                       "workers that share their weights"},
        WrongArguments{{"--wave-compatibility", "loose"}, "must be one of strict, schedule"},
        WrongArguments{{"--shutdown-grace", "5"}, "\"5\" is not a duration"},
        WrongArguments{{"--lisen", "x"}, "unknown argument \"--lisen\"; did you mean --listen?"},
        WrongArguments{{"--lisen=x"}, "did you mean --listen?"},
        WrongArguments{{"check", "--modle", "x"}, "did you mean --model?"},
        WrongArguments{{"frobnicate"}, "unknown argument \"frobnicate\""},
        WrongArguments{{"--listen"}, "--listen"},
        WrongArguments{{"--listen", "a:1", "--listen", "b:2"}, "--listen"},
        WrongArguments{{"serve", "check"}, ""}));

TEST(ServeConfigTest, AllTheRulesThatASettingBreaksAreToldAtOnce) {
  const Folder folder;
  const std::string file = folder.Write("c.yaml", "parallel: {sp: 2}\n");
  const absl::Status status = Parse({"--config", file, "--tp", "2", "--slots", "3"}).status();
  EXPECT_THAT(status.message(),
              AllOf(HasSubstr("--tp 2: "),
                    HasSubstr("--sp 2: sequence parallelism is not available yet; set it to 1 "
                              "(parallel.sp from file " +
                              file + ":1)"),
                    HasSubstr("offload.slots is 3")));
}

TEST(ServeConfigTest, TheReferencesFlagsSetTheTransfer) {
  EXPECT_EQ(Parse({"--enable-distributed-layerwise-offload", "--dlo-no-use-allgather"})
                ->config.offload.transfer,
            WeightTransfer::kRankLocal);
  EXPECT_EQ(Parse({"--enable-distributed-layerwise-offload"})->config.offload.transfer,
            WeightTransfer::kAllGather);
  // They are flags, which beat environment and file.
  const Folder folder;
  const std::string file = folder.Write("c.yaml", "offload: {transfer: none}\n");
  const absl::StatusOr<ServeCommand> printed =
      Parse({"--config", file, "--enable-distributed-layerwise-offload", "--dlo-no-use-allgather",
             "--dlo-resident-layers", "0", "--print-config"},
            {{"DLO_OFFLOAD_TRANSFER", "none"}});
  ASSERT_TRUE(printed.ok()) << printed.status();
  EXPECT_THAT(printed->text,
              AllOf(HasSubstr("transfer: rank-local  # flag "
                              "--enable-distributed-layerwise-offload --dlo-no-use-allgather\n"),
                    HasSubstr("resident_layers: 0  # flag --dlo-resident-layers\n")));
  EXPECT_THAT(Parse({"--dlo-resident-layers", "many"}).status().message(),
              HasSubstr("--dlo-resident-layers is \"many\", but must be a whole number"));
  EXPECT_THAT(Parse({"--dlo-use-allgathr"}).status().message(),
              HasSubstr("did you mean --dlo-use-allgather?"));
}

TEST(ServeConfigTest, OlderOffloadersAreTakenAndReportedAsSuperseded) {
  const absl::StatusOr<ServeCommand> alone = Parse({"--enable-layerwise-offload"});
  ASSERT_TRUE(alone.ok()) << alone.status();
  EXPECT_EQ(alone->config.offload.transfer, WeightTransfer::kNone);
  ASSERT_EQ(alone->config.notices.size(), 1u);
  EXPECT_THAT(alone->config.notices[0], AllOf(HasSubstr("--enable-layerwise-offload is superseded"),
                                              HasSubstr("use --transfer rank-local")));
  const absl::StatusOr<ServeCommand> both =
      Parse({"--transfer", "rank-local", "--enable-cpu-offload", "--enable-layerwise-offload"});
  ASSERT_TRUE(both.ok()) << both.status();
  EXPECT_EQ(both->config.notices.size(), 2u);
  EXPECT_THAT(both->config.notices[0],
              HasSubstr("--enable-cpu-offload is superseded by distributed layerwise offload"));
  EXPECT_THAT(Parse({"--print-config", "--enable-cpu-offload"})->text,
              ::testing::StartsWith("# --enable-cpu-offload is superseded"));
}

TEST(ServeConfigTest, AStoreThatIsNotUsedIsReported) {
  const auto notices = [](std::vector<std::string> arguments) {
    arguments.insert(arguments.end(),
                     {"--host-weights-mode", "required", "--host-weights-root", "/w"});
    const absl::StatusOr<ServeCommand> command = Parse(std::move(arguments));
    EXPECT_TRUE(command.ok()) << command.status();
    return command->config.notices;
  };
  EXPECT_THAT(notices({}), ::testing::ElementsAre(HasSubstr(
                               "host_weights.mode is required, but with offload.transfer none "
                               "workers use no artifacts and leave the store alone")));
  EXPECT_THAT(notices({"--transfer", "allgather", "--dp", "2"}),
              ::testing::ElementsAre(HasSubstr("offload.transfer allgather")));
  EXPECT_THAT(notices({"--transfer", "allgather"}), ::testing::IsEmpty());  // nothing to gather
  EXPECT_THAT(notices({"--transfer", "rank-local", "--dp", "2"}), ::testing::IsEmpty());
}

TEST(ServeConfigTest, GoodAddressesAreTaken) {
  for (const char* address :
       {"127.0.0.1:0", "localhost:65535", "[::]:50051", "0.0.0.0:1", "unix:/x"}) {
    EXPECT_EQ(Parse({"--listen", address})->config.listen, address);
  }
  for (const char* address : {"127.0.0.1:0", "localhost:9464", "[::1]:9464"}) {
    EXPECT_EQ(Parse({"--metrics-listen", address})->config.metrics_listen, address);
  }
}

// A copy of the demo model whose files a test can change.
class CheckTest : public ::testing::Test {
 protected:
  CheckTest() {
    std::filesystem::copy(kShapes, root(), std::filesystem::copy_options::recursive);
    for (const auto& entry : std::filesystem::recursive_directory_iterator(root())) {
      std::filesystem::permissions(entry.path(), std::filesystem::perms::owner_write,
                                   std::filesystem::perm_options::add);
    }
  }
  std::filesystem::path root() const { return folder_.path() / "model"; }

  absl::Status Check() {
    config_.model.path = root();
    out_.str("");
    return CheckServeConfig(config_, out_);
  }
  void Patch(const std::string& file, const std::string& key, const nlohmann::json& value) {
    nlohmann::json content = nlohmann::json::parse(std::ifstream(root() / file));
    content[key] = value;
    std::ofstream(root() / file) << content;
  }

  Folder folder_;
  ServeConfig config_;
  std::ostringstream out_;
};

TEST_F(CheckTest, TheDemoModelIsInOrder) {
  EXPECT_EQ(Check(), absl::OkStatus());
  for (const char* line :
       {"tokenizer: 254 ids", "text_encoder: ", "transformer: 231 tensors in 1 file", "vae: "}) {
    EXPECT_THAT(out_.str(), HasSubstr(line));
  }
}

// Its text encoder is stored in float32, its transformer in bfloat16.
TEST_F(CheckTest, WhereTheHostsWeightsComeFromIsShownWithTheReason) {
  config_.offload.transfer = WeightTransfer::kRankLocal;
  EXPECT_EQ(Check(), absl::OkStatus());
  EXPECT_THAT(out_.str(),
              AllOf(HasSubstr("host weights of text_encoder: blocks in the pages of 1 file"),
                    HasSubstr("host weights of transformer: blocks in private memory (dtype): "
                              "tensors have another dtype, ")));
  config_.model.dtype = DType::kBF16;
  EXPECT_EQ(Check(), absl::OkStatus());
  EXPECT_THAT(out_.str(), AllOf(HasSubstr("host weights of text_encoder: blocks in private"),
                                HasSubstr("host weights of transformer: blocks in the pages")));
  config_.host_weights.checkpoint_mmap = CheckpointMmap::kOn;
  EXPECT_THAT(Check().message(), AllOf(HasSubstr("host_weights.checkpoint_mmap is on"),
                                       HasSubstr("text_encoder: tensors have another dtype")));
  config_.offload.transfer = WeightTransfer::kNone;
  config_.host_weights.checkpoint_mmap = CheckpointMmap::kAuto;
  EXPECT_EQ(Check(), absl::OkStatus());
  EXPECT_THAT(out_.str(), Not(HasSubstr("host weights")));
}

// Only the transformer is quantised, so the text encoder's pages still serve.
TEST_F(CheckTest, Fp8IsShownInTheSizeAndRulesMappingOut) {
  config_.offload.transfer = WeightTransfer::kRankLocal;
  config_.model.quantization = OnlineQuantization::kPerTensorFp8;
  EXPECT_EQ(Check(), absl::OkStatus());
  EXPECT_THAT(out_.str(),
              AllOf(HasSubstr("transformer: 295 tensors in 1 file"),
                    HasSubstr("host weights of text_encoder: blocks in the pages of 1 file"),
                    HasSubstr("host weights of transformer: blocks in private memory "
                              "(online-quantization): weights are quantised while they are")));
}

TEST_F(CheckTest, WhatAStartWouldDoWithTheStoreIsShown) {
  config_.model.dtype = DType::kBF16;
  config_.host_weights.mode = hwr::Mode::kPreferred;
  config_.host_weights.root = folder_.path() / "store";
  // Not with blocks that stay on the device.
  EXPECT_EQ(Check(), absl::OkStatus());
  EXPECT_THAT(out_.str(), Not(HasSubstr("host weights")));

  config_.offload.transfer = WeightTransfer::kRankLocal;
  EXPECT_EQ(Check(), absl::OkStatus());
  EXPECT_THAT(
      out_.str(),
      AllOf(HasSubstr("host weights: mode preferred, store " + config_.host_weights.root.string()),
            HasSubstr("a start loads the checkpoint and stores an artifact"),
            HasSubstr("host weights of transformer: blocks in private memory (canonical)")));
  EXPECT_FALSE(std::filesystem::exists(config_.host_weights.root));
  config_.host_weights.mode = hwr::Mode::kRequired;
  EXPECT_FALSE(Check().ok());

  auto opened = hwr::Store::Open({.root = config_.host_weights.root});
  auto* const store = std::get_if<std::unique_ptr<hwr::Store>>(&opened);
  ASSERT_NE(store, nullptr) << std::get<hwr::Failure>(opened).Text();
  EXPECT_THAT(Check().message(), HasSubstr("miss"));
  const auto artifact = DescribeHostWeights(root(), {.dtype = DType::kBF16});
  ASSERT_TRUE(artifact.ok()) << artifact.status();
  CheckpointProducer producer(*artifact);
  ASSERT_EQ((*store)->Publish(artifact->identity, artifact->layout, producer, {}).outcome,
            hwr::PublicationOutcome::kPublished);
  EXPECT_EQ(Check(), absl::OkStatus());
  EXPECT_THAT(out_.str(), HasSubstr("artifact " + artifact->identity.key + " is there"));
  EXPECT_THAT(out_.str(), Not(HasSubstr("host weights of transformer")));
}

// A store with rank-local transfer, of the model in bfloat16.
class CheckStoreTest : public CheckTest {
 protected:
  CheckStoreTest() {
    config_.model.dtype = DType::kBF16;
    config_.offload.transfer = WeightTransfer::kRankLocal;
    config_.host_weights.mode = hwr::Mode::kPreferred;
    config_.host_weights.root = folder_.path() / "store";
  }
  std::unique_ptr<hwr::Store> Open(const hwr::StorePolicy& policy = {}) const {
    auto opened = hwr::Store::Open({.root = config_.host_weights.root, .policy = policy});
    auto* const store = std::get_if<std::unique_ptr<hwr::Store>>(&opened);
    EXPECT_NE(store, nullptr) << std::get<hwr::Failure>(opened).Text();
    return store == nullptr ? nullptr : std::move(*store);
  }
};

TEST_F(CheckStoreTest, LimitsThatTheStoreWasNotMadeWithFailAsAStartDoes) {
  Open({.max_store_bytes = 1 << 30, .max_artifact_bytes = 1 << 29});
  EXPECT_EQ(Check(), absl::OkStatus()) << "asks for none";
  config_.host_weights.max_store_bytes = 1 << 30;
  EXPECT_EQ(Check(), absl::OkStatus()) << "asks for the store's";
  config_.host_weights.max_store_bytes = 1 << 29;
  EXPECT_THAT(Check().message(), HasSubstr("other limits"));
  config_.host_weights.max_store_bytes = 0;
  config_.host_weights.min_free_bytes = 1;
  EXPECT_THAT(Check().message(), HasSubstr("other limits"));
}

TEST_F(CheckStoreTest, NothingIsWrittenToTheStore) {
  Open();
  const std::filesystem::path digests = config_.host_weights.root / "source-digests";
  EXPECT_EQ(Check(), absl::OkStatus());
  EXPECT_FALSE(std::filesystem::exists(digests));
  std::filesystem::create_directory(digests);
  EXPECT_EQ(Check(), absl::OkStatus());
  EXPECT_TRUE(std::filesystem::is_empty(digests));
}

TEST_F(CheckStoreTest, AnArtifactThatIsLockedIsWaitedForAsLongAsAStartWould) {
  const auto artifact = DescribeHostWeights(root(), {.dtype = DType::kBF16});
  ASSERT_TRUE(artifact.ok()) << artifact.status();
  CheckpointProducer producer(*artifact);
  ASSERT_EQ(Open()->Publish(artifact->identity, artifact->layout, producer, {}).outcome,
            hwr::PublicationOutcome::kPublished);
  const hwr::Descriptor folder(
      open((config_.host_weights.root / "artifacts" / artifact->identity.key).c_str(),
           O_RDONLY | O_CLOEXEC));
  ASSERT_EQ(flock(folder.get(), LOCK_EX | LOCK_NB), 0);
  config_.host_weights.wait = absl::Milliseconds(100);
  EXPECT_EQ(Check(), absl::OkStatus());
  EXPECT_THAT(out_.str(), AllOf(HasSubstr("lock-timeout"), HasSubstr("and stores nothing"),
                                HasSubstr("host weights of transformer: blocks in the pages")));
  config_.host_weights.mode = hwr::Mode::kRequired;
  EXPECT_THAT(Check().message(), HasSubstr("lock-timeout"));
}

TEST_F(CheckTest, AConfigurationThatDoesNotFitTheWeightsIsFound) {
  Patch("transformer/config.json", "num_layers", 9);
  EXPECT_THAT(Check().message(), AllOf(HasSubstr("transformer"), HasSubstr("blocks.8")));
  EXPECT_THAT(out_.str(), Not(HasSubstr("vae")));
  Patch("transformer/config.json", "num_layers", 7);
  EXPECT_THAT(Check().message(), HasSubstr("blocks.7"));
  Patch("transformer/config.json", "num_layers", 8);
  Patch("transformer/config.json", "ffn_dim", 500);
  EXPECT_THAT(Check().message(), HasSubstr("[512, 192] instead of [500, 192]"));
}

TEST_F(CheckTest, ABadConfigurationIsFound) {
  Patch("scheduler/scheduler_config.json", "solver_type", "bh1");
  EXPECT_THAT(Check().message(), HasSubstr("solver_type"));
}

TEST_F(CheckTest, ATruncatedWeightFileIsFound) {
  const std::filesystem::path file = root() / "vae/diffusion_pytorch_model.safetensors";
  std::filesystem::resize_file(file, std::filesystem::file_size(file) - 1);
  EXPECT_THAT(Check().message(), HasSubstr("vae/diffusion_pytorch_model.safetensors"));
}

TEST_F(CheckTest, MissingFilesAreFound) {
  std::filesystem::remove_all(root() / "tokenizer");
  EXPECT_EQ(Check().code(), absl::StatusCode::kNotFound);
  std::filesystem::remove_all(root());
  EXPECT_FALSE(Check().ok());
}

}  // namespace
}  // namespace dlo
