// RUN: %opt %s -p outline-scatter | %filecheck %s

// The sequential loop over the cells leaves @loop: it would be run on the host, and copy the buffer
// each time round. What comes before it stays, on tensors.

func.func @loop(%start: i64, %stop: i64, %map: tensor<?xi32>, %y: tensor<?xf64>) -> tensor<?xf64> {
  %first = arith.index_cast %start : i64 to index
  %end = arith.index_cast %stop : i64 to index
  %count = arith.subi %end, %first : index
  %empty = tensor.empty(%count) : tensor<?xf64>
  %one = arith.constant 1.0 : f64
  %values = linalg.fill ins(%one : f64) outs(%empty : tensor<?xf64>) -> tensor<?xf64>
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %done = scf.for %cell = %c0 to %count step %c1 iter_args(%buffer = %y) -> (tensor<?xf64>) {
    %entity = arith.addi %cell, %first : index
    %target = tensor.extract %map[%entity] : tensor<?xi32>
    %index = arith.index_cast %target : i32 to index
    %value = tensor.extract %values[%cell] : tensor<?xf64>
    %next = tensor.insert %value into %buffer[%index] : tensor<?xf64>
    scf.yield %next : tensor<?xf64>
  }
  func.return %done : tensor<?xf64>
}

// CHECK:       func.func @loop(%[[START:.*]]: i64, %[[STOP:.*]]: i64, %[[MAP:.*]]: tensor<?xi32>, %[[Y:.*]]: tensor<?xf64> {iree.abi.output = 0 : index}) -> tensor<?xf64>
// CHECK:         %[[VALUES:.*]] = linalg.fill
// CHECK-NOT:     scf.for
// CHECK:         %[[RESULT:.*]] = func.call @scatter(%[[START]], %[[STOP]], %[[START]], %[[MAP]], %[[VALUES]], %[[Y]])
// CHECK-NEXT:    func.return %[[RESULT]] : tensor<?xf64>
// CHECK:       func.func private @scatter(%{{.*}}: i64, %{{.*}}: i64, %{{.*}}: i64, %{{.*}}: tensor<?xi32>, %{{.*}}: tensor<?xf64>, %[[BUFFER:.*]]: tensor<?xf64>) -> tensor<?xf64> {
// CHECK:         scf.for %{{.*}} iter_args(%{{.*}} = %[[BUFFER]]) -> (tensor<?xf64>) {
// CHECK:           tensor.insert
