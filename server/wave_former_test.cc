#include "server/wave_former.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <iostream>
#include <map>
#include <random>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

namespace dlo {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

// A virtual clock in milliseconds.
absl::Time At(int64_t ms) { return absl::UnixEpoch() + absl::Milliseconds(ms); }

// A queue with one collective domain, whose waves end when the test says so.
class Domain {
 public:
  explicit Domain(int capacity, absl::Duration max_wait = absl::Milliseconds(500),
                  int max_waiting = 64)
      : former_({.max_waiting = max_waiting, .max_wait = max_wait}), slot_{capacity, At(0)} {}

  // "K5" is request 5 with key K.
  bool Add(const std::string& name, int64_t ms, absl::Time deadline = absl::InfiniteFuture()) {
    return former_.Add({name, name.substr(0, 1), deadline}, At(ms), busy_ ? 0 : slot_.capacity);
  }
  void Free(int64_t ms) {
    busy_ = false;
    slot_.free_since = At(ms);
  }
  std::vector<std::string> Take(int64_t ms) {
    if (busy_) return {};
    std::vector<std::string> wave = former_.TakeWave(slot_, At(ms));
    busy_ = !wave.empty();
    return wave;
  }
  WaveFormer& former() { return former_; }
  const WaveSlot& slot() const { return slot_; }

 private:
  WaveFormer former_;
  WaveSlot slot_;
  bool busy_ = false;
};

struct Row {
  const char* what;
  int capacity;
  int64_t max_wait_ms;
  const char* arrivals;  // "A1@0 A2@100": request, its key the letter, and when it comes
  const char* starts;    // "250: A1 A2": when the first wave starts, and who is in it
};

// The first wave of a domain that is free from the start on.
const Row kRows[] = {
    {"independent replicas take what comes at once", 1, 0, "A1@5", "5: A1"},
    {"without a wait a collective domain starts with what is there", 4, 0, "A1@5", "5: A1"},
    {"a full wave starts at once", 2, 500, "A1@0 A2@10", "10: A1 A2"},
    {"alone, after the stable window: min(300, 500 / 2)", 4, 500, "A1@0", "250: A1"},
    {"the stable window is 300 ms at most", 4, 2000, "A1@0", "300: A1"},
    {"a companion starts the stable window again", 4, 500, "A1@0 A2@100", "350: A1 A2"},
    {"but the leader waits max_wait at most", 8, 500, "A1@0 A2@200 A3@400", "500: A1 A2 A3"},
    {"incompatible arrivals do not prolong the wait", 4, 500, "A1@0 B1@100 B2@200", "250: A1"},
    {"nor end it, however many (reference row 32)", 4, 500, "A1@0 B1@1 B2@2 B3@3 B4@4", "250: A1"},
    {"compatible ones join from behind incompatible ones", 2, 500, "A1@0 B1@10 A2@20", "20: A1 A2"},
    {"no more than the capacity", 2, 500, "A1@0 A2@0 A3@0", "0: A1 A2"},
};

TEST(WaveFormerTest, TheFirstWaveStartsWhenItShouldWithWhomItShould) {
  for (const Row& row : kRows) {
    WaveFormer former({.max_wait = absl::Milliseconds(row.max_wait_ms)});
    const WaveSlot slot{row.capacity, At(0)};
    std::multimap<int64_t, std::string> arrivals;
    for (absl::string_view arrival : absl::StrSplit(row.arrivals, ' ')) {
      const std::pair<std::string, std::string> parts = absl::StrSplit(arrival, '@');
      arrivals.insert({std::stoll(parts.second), parts.first});
    }
    std::string started = "never";
    for (int64_t ms = 0; ms < 3000 && started == "never"; ++ms) {
      const auto [first, last] = arrivals.equal_range(ms);
      for (auto it = first; it != last; ++it) {
        former.Add({it->second, it->second.substr(0, 1)}, At(ms));
      }
      const absl::Time announced = former.NextTime(slot);
      const std::vector<std::string> wave = former.TakeWave(slot, At(ms));
      EXPECT_EQ(announced <= At(ms), !wave.empty()) << row.what << " at " << ms;
      if (!wave.empty()) started = absl::StrCat(ms, ": ", absl::StrJoin(wave, " "));
    }
    EXPECT_EQ(started, row.starts) << row.what;
  }
}

// Section 1.8, rows 69 to 72, and 2.10, rows 158 to 163: what does not fit the head is neither
// refused nor run with it, but leads a later wave; keys are compatibility_key_test.cc's.
TEST(WaveFormerTest, IncompatibleRequestsAreDeferredToWavesOfTheirOwn) {
  Domain domain(4);
  for (const char* name : {"A1", "B1", "A2", "C1", "B2"}) domain.Add(name, 0);
  EXPECT_THAT(domain.Take(250), ElementsAre("A1", "A2"));
  EXPECT_THAT(domain.Take(260), IsEmpty());
  // The domain was busy; those who waited get the same chance of company as others.
  domain.Free(1000);
  EXPECT_THAT(domain.Take(1249), IsEmpty());
  EXPECT_THAT(domain.Take(1250), ElementsAre("B1", "B2"));
  domain.Free(2000);
  EXPECT_THAT(domain.Take(2250), ElementsAre("C1"));
  EXPECT_EQ(domain.former().size(), 0u);
}

TEST(WaveFormerTest, AFullWaveIsWaitingWhenTheDomainIsFree) {
  Domain domain(2);
  for (const char* name : {"A1", "A2", "A3", "A4", "A5"}) domain.Add(name, 0);
  EXPECT_THAT(domain.Take(0), ElementsAre("A1", "A2"));
  domain.Free(1000);
  EXPECT_THAT(domain.Take(1000), ElementsAre("A3", "A4"));
  domain.Free(2000);
  EXPECT_THAT(domain.Take(2000), IsEmpty());
  domain.Add("A6", 2010);
  EXPECT_THAT(domain.Take(2010), ElementsAre("A5", "A6"));
}

TEST(WaveFormerTest, TheQueueIsBoundedAndAFreeDomainMakesRoom) {
  Domain domain(2, absl::Milliseconds(500), /*max_waiting=*/1);
  EXPECT_TRUE(domain.Add("A1", 0));
  EXPECT_TRUE(domain.Add("B1", 0));
  EXPECT_TRUE(domain.Add("C1", 0));
  EXPECT_FALSE(domain.Add("D1", 0));
  EXPECT_THAT(domain.Take(250), ElementsAre("A1"));
  EXPECT_FALSE(domain.Add("D1", 251));
  domain.former().Remove("B1");
  domain.former().Remove("C1");
  EXPECT_TRUE(domain.Add("D1", 252));
  EXPECT_FALSE(domain.Add("E1", 252));
}

TEST(WaveFormerTest, AGivenUpHeadMakesWayWithoutMakingTheNextWaitAgain) {
  Domain domain(4);
  domain.Add("A1", 0);
  domain.Add("B1", 10);
  domain.Add("B2", 20);
  EXPECT_EQ(domain.former().Remove("A1"), 0u);
  EXPECT_EQ(domain.former().Remove("A1"), std::nullopt);
  EXPECT_EQ(domain.former().id(0), "B1");
  EXPECT_EQ(domain.former().NextTime(domain.slot()), At(270));
  EXPECT_THAT(domain.Take(270), ElementsAre("B1", "B2"));
}

TEST(WaveFormerTest, AGivenUpMemberDoesNotJoinAndDoesNotCount) {
  Domain domain(2);
  domain.Add("A1", 0);
  domain.Add("B1", 0);
  domain.Add("A2", 100);
  domain.former().Remove("A2");
  EXPECT_EQ(domain.former().NextTime(domain.slot()), At(250));
  EXPECT_THAT(domain.Take(250), ElementsAre("A1"));
}

TEST(WaveFormerTest, ThoseWhoseDeadlinePassesAreDropped) {
  Domain domain(4);
  domain.Add("A1", 0, At(100));
  domain.Add("B1", 0, At(50));
  domain.Add("A2", 0);
  EXPECT_EQ(domain.former().NextDeadline(), At(50));
  EXPECT_THAT(domain.former().TakeExpired(At(49)), IsEmpty());
  EXPECT_THAT(domain.former().TakeExpired(At(120)), ElementsAre("A1", "B1"));
  EXPECT_EQ(domain.former().NextDeadline(), absl::InfiniteFuture());
  EXPECT_THAT(domain.Take(250), ElementsAre("A2"));
}

TEST(WaveFormerTest, TakeAllLeavesNothing) {
  Domain domain(4);
  domain.Add("A1", 0, At(100));
  domain.Add("B1", 0);
  EXPECT_THAT(domain.former().TakeAll(), ElementsAre("A1", "B1"));
  EXPECT_EQ(domain.former().NextTime(domain.slot()), absl::InfiniteFuture());
  EXPECT_THAT(domain.Take(10'000), IsEmpty());
}

TEST(WaveFormerTest, SlotsThatAreFreeShareTheQueue) {
  WaveFormer former({});
  for (const char* name : {"A1", "B1", "A2"}) former.Add({name, name}, At(0));
  EXPECT_THAT(former.TakeWave({}, At(0)), ElementsAre("A1"));
  EXPECT_THAT(former.TakeWave({}, At(0)), ElementsAre("B1"));
  EXPECT_THAT(former.TakeWave({}, At(0)), ElementsAre("A2"));
  EXPECT_THAT(former.TakeWave({}, At(0)), IsEmpty());
}

struct Load {
  double fill = 0;  // requests per wave and place
  int waves = 0;
  bool fair = true;
};

// A collective domain under Poisson arrivals of `num_keys` keys, each wave taking as long as the
// last. Checks on the way that every wave is led by the oldest request.
Load Simulate(int capacity, int num_keys, double arrivals_per_s, absl::Duration wave_time,
              unsigned seed) {
  std::mt19937 random(seed);
  std::exponential_distribution<double> gap_s(arrivals_per_s);
  std::uniform_int_distribution<int> key(0, num_keys - 1);
  WaveFormer former({.max_waiting = 1'000'000, .max_wait = absl::Milliseconds(500)});
  WaveSlot slot{capacity, At(0)};
  Load load;
  int64_t served = 0;
  int next_id = 0;
  std::map<int, int> overtaken;  // waves that started while the request waited, by its id
  absl::Time next_arrival = At(0);
  for (absl::Time now = At(0); served < 4000;) {
    const absl::Time next_wave = std::max(former.NextTime(slot), slot.free_since);
    if (next_arrival <= next_wave) {
      now = next_arrival;
      former.Add({std::to_string(next_id++), std::to_string(key(random))}, now);
      next_arrival = now + absl::Seconds(gap_s(random));
      continue;
    }
    now = std::max(now, next_wave);
    const std::string oldest = former.id(0);
    const std::vector<std::string> wave = former.TakeWave(slot, now);
    load.fair = load.fair && !wave.empty() && wave[0] == oldest;
    if (wave.empty()) return load;
    ++load.waves;
    served += static_cast<int64_t>(wave.size());
    slot.free_since = now + wave_time;
  }
  load.fill = static_cast<double>(served) / (load.waves * capacity);
  return load;
}

TEST(WaveFormerTest, EveryWaveIsLedByTheOldestRequestAndKeysFindTheirCompany) {
  // 4 replicas, waves of 30 s, 5 keys, arrivals at 60%, 90% and 300% of what full waves would
  // serve.
  for (const auto& [rate, fill_min] : {std::pair{0.6, 0.55}, {0.9, 0.85}, {3.0, 0.99}}) {
    const Load load = Simulate(4, 5, rate * 4 / 30, absl::Seconds(30), 7);
    EXPECT_TRUE(load.fair);
    EXPECT_GE(load.fill, fill_min);
    std::cout << "[ fill     ] 4 replicas, 5 keys, Poisson arrivals at " << rate * 100
              << "% of what full waves of 30 s serve: " << load.fill << " of the places, "
              << load.waves << " waves" << std::endl;
  }
}

// A request waits for each incompatible one before it at most once: with every key's requests
// fitting one wave, one with n other keys before it starts in wave n + 1 at the latest.
TEST(WaveFormerTest, NobodyWaitsLongerThanOneWaveForEachIncompatibleKeyBeforeIt) {
  std::mt19937 random(3);
  for (int round = 0; round < 200; ++round) {
    const int capacity = 4;
    WaveFormer former({.max_waiting = 1000, .max_wait = absl::Milliseconds(500)});
    std::vector<std::string> keys;
    for (int i = 0; i < 12; ++i) {
      keys.push_back(std::string(1, static_cast<char>('A' + random() % 4)));
      former.Add({std::to_string(i), keys.back()}, At(0));
    }
    std::vector<int> started(keys.size(), -1);
    for (int wave = 0; former.size() > 0; ++wave) {
      // More come all the time.
      const int id = static_cast<int>(keys.size());
      keys.push_back(std::string(1, static_cast<char>('A' + random() % 4)));
      started.push_back(-1);
      if (id < 24) former.Add({std::to_string(id), keys.back()}, At(wave * 1000));
      for (const std::string& taken :
           former.TakeWave({capacity, At(wave * 1000)}, At(wave * 1000 + 500))) {
        started[std::stoi(taken)] = wave;
      }
    }
    for (int i = 0; i < 12; ++i) {
      // Waves that are needed for what stood before it, and its own.
      std::map<std::string, int> before;
      for (int j = 0; j < i; ++j) ++before[keys[j]];
      int bound = before[keys[i]] / capacity;
      for (const auto& [key, count] : before) {
        if (key != keys[i]) bound += (count + capacity - 1) / capacity;
      }
      EXPECT_LE(started[i], bound) << "request " << i;
    }
  }
}

TEST(WaveFormerTest, TellsWhoWouldHaveBeenInTheWaveButForTheKey) {
  Domain domain(/*capacity=*/3);
  for (const char* name : {"A1", "B1", "A2", "C1", "B2", "A3"}) domain.Add(name, 10);
  WaveFormed formed;
  EXPECT_THAT(domain.former().TakeWave(domain.slot(), At(20), &formed),
              ElementsAre("A1", "A2", "A3"));
  EXPECT_EQ(formed.key, "A");
  EXPECT_THAT(formed.deferred_keys, ElementsAre("B"));
  EXPECT_EQ(formed.leading_since, At(10));
  // C1 fits beside B1 and B2 by number alone.
  domain.Free(100);
  EXPECT_THAT(domain.former().TakeWave(domain.slot(), At(900), &formed), ElementsAre("B1", "B2"));
  EXPECT_EQ(formed.key, "B");
  EXPECT_THAT(formed.deferred_keys, ElementsAre("C"));
  EXPECT_EQ(formed.leading_since, At(100));
}

TEST(WaveFormerTest, AReplicaOnItsOwnDefersNobody) {
  Domain domain(/*capacity=*/1);
  for (const char* name : {"A1", "B1"}) domain.Add(name, 10);
  WaveFormed formed;
  EXPECT_THAT(domain.former().TakeWave(domain.slot(), At(20), &formed), ElementsAre("A1"));
  EXPECT_THAT(formed.deferred_keys, IsEmpty());
}

}  // namespace
}  // namespace dlo
