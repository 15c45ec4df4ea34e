#include "server/result_queue.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <thread>

#include "absl/time/clock.h"

namespace dlo {
namespace {

ResultItem Chunk(int64_t bytes) {
  v1::ResultChunk chunk;
  chunk.set_data(std::string(bytes, 'x'));
  return chunk;
}

bool IsChunk(const std::optional<ResultItem>& item) {
  return item && std::holds_alternative<v1::ResultChunk>(*item);
}

TEST(ResultQueueTest, IsFullByMessagesOrByBytesAndTellsOnceWhenThereIsRoom) {
  for (const ResultQueue::Limits limits : {ResultQueue::Limits{.messages = 2, .bytes = 1000},
                                           ResultQueue::Limits{.messages = 100, .bytes = 20}}) {
    ResultQueue queue(limits);
    int room = 0;
    queue.SetOnRoom([&] { ++room; });
    queue.Open(1, nullptr);
    EXPECT_TRUE(queue.Push(1, Chunk(10)));
    EXPECT_FALSE(queue.Push(1, Chunk(10)));
    EXPECT_EQ(room, 0);
    EXPECT_TRUE(IsChunk(queue.Pop(1)));
    EXPECT_EQ(room, 1);
    EXPECT_TRUE(IsChunk(queue.Pop(1)));
    EXPECT_EQ(room, 1);
    EXPECT_FALSE(queue.Pop(1));
    EXPECT_EQ(queue.bytes(), 0);
    EXPECT_EQ(queue.messages(), 0);
  }
}

TEST(ResultQueueTest, AnItemTakenWhileItArrivesMakesRoomBeforePushReturns) {
  ResultQueue queue({.messages = 1, .bytes = 1000});
  int room = 0;
  queue.SetOnRoom([&] { ++room; });
  queue.Open(1, [&] { queue.Pop(1); });
  EXPECT_FALSE(queue.Push(1, Chunk(10)));
  EXPECT_EQ(room, 1);
}

TEST(ResultQueueTest, LanesAreApartAndKeepTheirOrder) {
  ResultQueue queue({});
  queue.Open(1, nullptr);
  queue.Open(2, nullptr);
  queue.Push(1, Chunk(1));
  queue.Push(2, Chunk(2));
  v1::WaveFinished finished;
  finished.set_size_bytes(7);
  queue.Push(1, finished);
  EXPECT_EQ(std::get<v1::ResultChunk>(*queue.Pop(2)).data().size(), 2u);
  EXPECT_FALSE(queue.Pop(2));
  EXPECT_EQ(std::get<v1::ResultChunk>(*queue.Pop(1)).data().size(), 1u);
  EXPECT_EQ(std::get<v1::WaveFinished>(*queue.Pop(1)).size_bytes(), 7);
}

TEST(ResultQueueTest, ClosingALaneDropsItsItemsAndWhatStillComes) {
  ResultQueue queue({.messages = 2, .bytes = 1000});
  int room = 0;
  queue.SetOnRoom([&] { ++room; });
  queue.Open(1, nullptr);
  queue.Push(1, Chunk(10));
  EXPECT_FALSE(queue.Push(1, Chunk(10)));
  queue.Close(1);
  EXPECT_EQ(room, 1);
  EXPECT_EQ(queue.bytes(), 0);
  EXPECT_TRUE(queue.Push(1, Chunk(10)));
  EXPECT_EQ(queue.dropped(), 1);
  EXPECT_EQ(queue.messages(), 0);
  EXPECT_FALSE(queue.Pop(1));
}

TEST(ResultQueueTest, AProducerThatWaitsForRoomNeverExceedsTheLimitAndNeverHangs) {
  ResultQueue queue({.messages = 3, .bytes = 50});
  absl::Mutex mutex;
  bool room = false;
  int64_t taken = 0;
  queue.SetOnRoom([&] {
    absl::MutexLock lock(&mutex);
    room = true;
  });
  queue.Open(1, nullptr);
  constexpr int kItems = 20000;
  std::thread consumer([&] {
    while (taken < kItems) {
      if (queue.Pop(1)) ++taken;
    }
  });
  std::minstd_rand random(1);
  for (int i = 0; i < kItems; ++i) {
    const bool more = queue.Push(1, Chunk(random() % 30));
    EXPECT_LE(queue.bytes(), 80);
    EXPECT_LE(queue.messages(), 3);
    if (more) continue;
    absl::MutexLock lock(&mutex);
    ASSERT_TRUE(mutex.AwaitWithTimeout(absl::Condition(&room), absl::Seconds(20)));
    room = false;
  }
  consumer.join();
  EXPECT_EQ(queue.bytes(), 0);
}

}  // namespace
}  // namespace dlo
